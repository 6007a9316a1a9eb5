"""A small configuration of the same kind as a transformers model's: fewer and narrower blocks, whose kinds stay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shoal.models.huggingface.adapter import HuggingFace
from shoal.models.huggingface.experts import mixtures
from shoal.models.huggingface.source import builder_of, read_config
from shoal.parallel.spread import require_sizes
from shoal.plan import Plan

WINDOW = 5  # shorter than the short sequences, so that windows still matter


def small_options(
    family: str,
    options: dict[str, Any],
    plan: Plan,
    length: int,
    *,
    head_width: int = 8,
    same_tokens: bool = False,
) -> dict[str, Any]:
    """`[model.options]` of a small model of the same kind with new weights, which the plan can cut.

    Not every kind of model can be narrow: where transformers or the plan refuse a narrow one, only its blocks become fewer. What
    the plan refuses in any size is as small as it can be built.

    Args:
        family: "hf:<path or id>".
        length: of the sequences, in tokens.
        head_width: of which every width is a multiple.
        same_tokens: the data is the user's own, so the vocabulary stays.

    Raises:
        ValueError: there is no such model.
    """
    config = read_config(family, options)
    built: list[dict[str, Any]] = []
    for smaller in _candidates(config, plan, head_width, same_tokens):
        tried: dict[str, Any] = {
            **options,
            "weights": False,
            "config": {**options.get("config", {}), **smaller},
        }
        try:
            model = builder_of(family, **tried)()
        except Exception:  # of many kinds: some models have rules of their own for their sizes
            continue
        built.append(tried)
        if _is_allowed(model, plan, length):
            return tried
    return built[0] if built else {**options, "weights": False}


def vocabulary(family: str, options: dict[str, Any]) -> int:
    """How many tokens a model knows."""
    return int(read_config(family, options).vocab_size)


def num_experts(family: str, options: dict[str, Any]) -> int:
    """Experts of a mixture that ranks can share; 1 for any other model."""
    found = mixtures(builder_of(family, **options)().inner)
    return next((int(str(module.num_experts)) for module in found.values()), 1)


def is_tied(family: str, options: dict[str, Any]) -> bool:
    """Whether the head is the embedding."""
    return bool(getattr(read_config(family, options), "tie_word_embeddings", False))


def _candidates(config: Any, plan: Plan, head_width: int, same_tokens: bool) -> Iterator[dict[str, Any]]:
    blocks, narrower = _fewer_blocks(config, plan), _narrower(config, plan, head_width)
    if not same_tokens:
        narrower |= _fewer_tokens(config, plan)
    yield {**blocks, **narrower}
    yield blocks


def _is_allowed(model: HuggingFace, plan: Plan, length: int) -> bool:
    try:
        require_sizes(model, plan, length)
    except ValueError:
        return False
    return True


def _fewer_blocks(config: Any, plan: Plan) -> dict[str, Any]:
    """As few as the plan has stages and the model has kinds of blocks."""
    many, own = config.num_hidden_layers, config.to_dict()
    by_block = {key: value for key, value in own.items() if isinstance(value, list) and len(value) == many}
    kinds = {key: list(dict.fromkeys(value)) for key, value in by_block.items() if _is_hashable(value)}
    few = min(many, max(2, plan.stages, *(len(values) for values in kinds.values())))
    cut = {key: [values[place % len(values)] for place in range(few)] for key, values in kinds.items()}
    dense = getattr(config, "first_k_dense_replace", None)  # blocks before the first with experts
    return {"num_hidden_layers": few, **cut} | (
        {} if dense is None else {"first_k_dense_replace": min(1, dense)}
    )


def _is_hashable(values: list[Any]) -> bool:
    return all(isinstance(value, str | int | bool | float) for value in values)


def _narrower(config: Any, plan: Plan, head_width: int) -> dict[str, Any]:
    """The entries that there are, as small as the plan's axes divide; grouped heads stay grouped."""
    heads = math.lcm(4, plan.tensor * (plan.context if plan.context_by == "all_to_all" else 1))
    groups = getattr(config, "num_key_value_heads", None)
    grouped = groups is not None and groups < config.num_attention_heads
    inner, experts = math.lcm(head_width, plan.tensor) * 5, math.lcm(4, plan.expert)
    wanted = {
        "hidden_size": heads * head_width,
        "num_attention_heads": heads,
        "num_key_value_heads": math.gcd(heads, max(2, plan.tensor // 2)) if grouped else heads,
        "head_dim": head_width,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(2, getattr(config, "num_experts_per_tok", None) or 2),
        "sliding_window": WINDOW,
    }
    return _those_there(config, wanted)


def _fewer_tokens(config: Any, plan: Plan) -> dict[str, Any]:
    marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return _those_there(config, {"vocab_size": math.lcm(4, plan.tensor) * 66, **marks})


def _those_there(config: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in wanted.items() if getattr(config, key, None) is not None}
