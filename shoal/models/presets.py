"""Dimensions of the Llama family, by name; needs no torch, so that a job can be checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from shoal.job import Model

Named = TypeVar("Named")


class LlamaDims(NamedTuple):
    """Every number that shapes a Llama model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Preset(NamedTuple):
    """Named dimensions; what it leaves open is the tokenizer's or the same for all."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool
    vocab: int | None = None
    rope_theta: float = 10_000.0


# The first six are ours, for small machines, and take the tokenizer's vocabulary; from 433m on they are the
# published Llama 3 dimensions (433m: a 12-layer cut of width 1024).
_PRESETS = {
    "1m": Preset(128, 4, 2, 1, 352, tied=True),
    "2m": Preset(192, 4, 3, 1, 512, tied=True),
    "5m": Preset(256, 6, 4, 2, 704, tied=True),
    "25m": Preset(512, 8, 8, 4, 1376, tied=True),
    "60m": Preset(640, 12, 10, 5, 1728, tied=True),
    "150m": Preset(768, 12, 12, 4, 2816, tied=False, vocab=32_000),
    "433m": Preset(1024, 12, 16, 8, 3584, tied=False, vocab=128_256, rope_theta=500_000.0),
    "1b": Preset(2048, 16, 32, 8, 8192, tied=True, vocab=128_256, rope_theta=500_000.0),
    "3b": Preset(3072, 28, 24, 8, 8192, tied=True, vocab=128_256, rope_theta=500_000.0),
    "8b": Preset(4096, 32, 32, 8, 14336, tied=False, vocab=128_256, rope_theta=500_000.0),
    "70b": Preset(8192, 80, 64, 8, 28672, tied=False, vocab=128_256, rope_theta=500_000.0),
    "405b": Preset(16384, 126, 128, 8, 53248, tied=False, vocab=128_256, rope_theta=500_000.0),
}

PRESET_NAMES = tuple(_PRESETS)


def resolve(model: Model, vocab: int | None = None) -> LlamaDims:
    """Fill a model table's dimensions: its own, else its preset's, else derived ones.

    Args:
        vocab: the tokenizer's size, used when neither the table nor the preset says one.

    Raises:
        ValueError: naming the key, its value and the values that would work.
    """
    return resolve_from(model, named_preset(model.preset, _PRESETS, "5m"), vocab)


def resolve_from(model: Model, preset: Preset, vocab: int | None) -> LlamaDims:
    """As `resolve`, beside a preset that is given."""
    dim = model.dim or preset.dim
    heads = model.heads or (preset.heads if model.dim is None else max(1, dim // 64))
    kv_heads = model.kv_heads or (preset.kv_heads if heads == preset.heads else heads)
    dims = LlamaDims(
        dim=dim,
        layers=model.layers or preset.layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=model.ffn or (preset.ffn if model.dim is None else -(-dim * 8 // 3 // 32) * 32),
        vocab=model.vocab or preset.vocab or vocab or 0,
        tied=preset.tied if model.tied is None else model.tied,
        rope_theta=model.rope_theta or preset.rope_theta,
        norm_eps=model.norm_eps or 1e-5,
    )
    _check(dims, vocab)
    return dims


def num_parameters(dims: LlamaDims) -> int:
    """Parameters of the whole model, a tied head counted once."""
    attention = dims.dim * dims.head_dim * (2 * dims.heads + 2 * dims.kv_heads)
    block = attention + 3 * dims.dim * dims.ffn + 2 * dims.dim
    embeddings = dims.vocab * dims.dim * (1 if dims.tied else 2)
    return dims.layers * block + embeddings + dims.dim


def named_preset(name: str | None, presets: Mapping[str, Named], usual: str) -> Named:
    """The preset of a name, or the usual one.

    Raises:
        ValueError: naming those that there are.
    """
    if name is None:
        return presets[usual]
    if name not in presets:
        raise ValueError(f"model.preset = {name!r} is unknown; presets: {', '.join(presets)}")
    return presets[name]


def _check(dims: LlamaDims, vocab: int | None) -> None:
    if dims.dim % dims.heads:
        works = [
            heads
            for heads in range(1, dims.dim + 1)
            if dims.dim % heads == 0 and (dims.dim // heads) % 2 == 0
        ]
        near = sorted(works, key=lambda heads: abs(heads - dims.heads))[:3]
        raise ValueError(
            f"model.heads = {dims.heads} does not divide model.dim = {dims.dim}; such as {sorted(near)} do"
        )
    if dims.head_dim % 2:
        raise ValueError(
            f"model.dim / model.heads = {dims.head_dim} must be even for rotary positions; change model.heads"
        )
    if dims.heads % dims.kv_heads:
        works = [kv for kv in range(1, dims.heads + 1) if dims.heads % kv == 0]
        raise ValueError(
            f"model.kv_heads = {dims.kv_heads} does not divide model.heads = {dims.heads}; {works} do"
        )
    if vocab is not None and dims.vocab < vocab:
        raise ValueError(
            f"model.vocab = {dims.vocab} is smaller than the tokenizer's {vocab}; leave model.vocab out"
        )
