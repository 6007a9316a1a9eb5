"""Dimensions of the mixture-of-experts family, by name; needs no torch, so that a job can be checked before anything starts."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shoal.job import Model
from shoal.models.presets import LlamaDims, Preset, named_preset, num_parameters, resolve_from

Scoring = Literal["softmax", "sigmoid"]


class MoeDims(NamedTuple):
    """Every number that shapes a mixture-of-experts model."""

    base: LlamaDims
    """all but the experts; its `ffn` is the width of the shared experts together, 0 without any"""
    experts: int
    top_k: int
    """experts that each token goes to"""
    expert_ffn: int
    """hidden width of one expert"""
    scoring: Scoring
    balance_rate: float


class _Experts(NamedTuple):
    experts: int
    top_k: int
    expert_ffn: int
    shared_experts: int = 0
    scoring: Scoring = "softmax"


# Named by experts x the size of the dense model that has one expert's width. 64x1b has the dimensions of OLMoE-1B-7B, 8x7b
# those of Mixtral 8x7B; the others are ours.
_PRESETS = {
    "4x1m": (Preset(128, 4, 2, 1, 0, tied=True), _Experts(4, 2, 352)),
    "8x5m": (Preset(256, 6, 4, 2, 0, tied=True), _Experts(8, 2, 704)),
    "16x25m": (Preset(512, 8, 8, 4, 0, tied=True), _Experts(16, 4, 704, 1, "sigmoid")),
    "8x1b": (Preset(2048, 16, 32, 8, 0, tied=True, vocab=128_256, rope_theta=5e5), _Experts(8, 2, 8192)),
    "64x1b": (Preset(2048, 16, 16, 16, 0, tied=False, vocab=50_304), _Experts(64, 8, 1024)),
    "8x7b": (Preset(4096, 32, 32, 8, 0, tied=False, vocab=32_000, rope_theta=1e6), _Experts(8, 2, 14336)),
}

MOE_PRESET_NAMES = tuple(_PRESETS)


def resolve_moe(model: Model, vocab: int | None = None) -> MoeDims:
    """Fill a model table's dimensions: its own, else its preset's, else derived ones.

    Args:
        vocab: the tokenizer's size, used when neither the table nor the preset says one.

    Raises:
        ValueError: naming the key, its value and the values that would work.
    """
    preset, own = named_preset(model.preset, _PRESETS, "8x5m")
    base = resolve_from(model, preset, vocab)
    expert_ffn = model.expert_ffn or (own.expert_ffn if model.dim is None else base.ffn)
    shared = own.shared_experts if model.shared_experts is None else model.shared_experts
    dims = MoeDims(
        base=base._replace(ffn=shared * expert_ffn),
        experts=model.experts or own.experts,
        top_k=model.top_k or own.top_k,
        expert_ffn=expert_ffn,
        scoring=model.scoring or own.scoring,
        balance_rate=1e-3 if model.balance_rate is None else model.balance_rate,
    )
    _check(dims, model)
    return dims


def num_moe_parameters(dims: MoeDims, *, active: bool = False) -> int:
    """Parameters of the whole model, a tied head counted once; `active`: those that one token meets."""
    experts = dims.top_k if active else dims.experts
    block = dims.base.dim * (dims.experts + 3 * experts * dims.expert_ffn)
    return num_parameters(dims.base) + dims.base.layers * block


def _check(dims: MoeDims, model: Model) -> None:
    if model.ffn is not None:
        raise ValueError(
            f"model.ffn = {model.ffn} is the feed-forward width of family 'llama'; for 'moe' say model.expert_ffn, the width of "
            "one expert"
        )
    if dims.top_k > dims.experts:
        raise ValueError(
            f"model.top_k = {dims.top_k} is more than model.experts = {dims.experts}; use 1 to {dims.experts}"
        )
