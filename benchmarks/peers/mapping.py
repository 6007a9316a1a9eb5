"""Where a peer's parameters come from: the product's, by name, in the peer's order of rows.

Tensors in, tensors out; no peer has to be installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.models.presets import LlamaDims

Whole = Callable[[str], Tensor]
"""From the product's name of a parameter to its whole initial value, in fp32 on the CPU"""
Find = Callable[[str, Whole], Tensor]
"""From a peer's name of a parameter to the value that it is to have: whole, or this rank's part of it"""

HUGGING_FACE = {
    "model.embed_tokens": "embedding",
    "model.layers.": "blocks.",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "model.norm": "norm",
    "lm_head": "head",
}

TORCHTITAN = {
    "_orig_mod.": "",
    "_checkpoint_wrapped_module.": "",
    "tok_embeddings": "embedding",
    "layers.": "blocks.",
    "attention.wq": "attention.query",
    "attention.wk": "attention.key",
    "attention.wv": "attention.value",
    "attention.wo": "attention.output",
    "feed_forward.w1": "feed_forward.gate",
    "feed_forward.w2": "feed_forward.down",
    "feed_forward.w3": "feed_forward.up",
    "ffn_norm": "feed_forward_norm",
}


def renamed(name: str, table: dict[str, str]) -> str:
    """A name with parts of it replaced.

    Example:
        >>> renamed("model.layers.0.mlp.up_proj.weight", HUGGING_FACE)
        'blocks.0.feed_forward.up.weight'
    """
    for theirs, ours in table.items():
        name = name.replace(theirs, ours)
    return name


def torchtitan_value(name: str, whole: Whole, dims: LlamaDims) -> Tensor:
    """A weight of torchtitan's Llama; queries and keys have their rows in the order of its rotary pairs.

    The product turns pairs (i, i + E/2) of a head of width E, torchtitan pairs (2 i, 2 i + 1).
    """
    name = renamed(name, TORCHTITAN)
    tensor = whole("head.weight" if name == "output.weight" else name)
    if not name.endswith(("attention.query.weight", "attention.key.weight")):
        return tensor
    half = dims.head_dim // 2
    rows, width = tensor.shape
    return tensor.view(rows // (2 * half), 2, half, width).transpose(1, 2).reshape(rows, width)


def megatron_part(name: str, whole: Whole, dims: LlamaDims, rank: int, tensor: int) -> Tensor:
    """A rank's part of a parameter of Megatron-Core's GPT, of `tensor` ranks, from the product's whole ones.

    Queries, keys and values are one matrix: group by group the queries that share a key, their key, their value. Gate and up
    are one: a rank has its part of gate, then its part of up.
    """
    cut = _Cut(rank, tensor)
    if name.endswith("final_layernorm.weight"):
        return whole("norm.weight")
    if name.startswith("embedding.word_embeddings"):
        return cut.rows(whole("embedding.weight"))
    if name.startswith("output_layer"):
        return cut.rows(whole("head.weight"))
    _, _, layer, *rest = name.split(".")
    inner, block = ".".join(rest), f"blocks.{layer}"
    if inner == "input_layernorm.weight":
        return whole(f"{block}.attention_norm.weight")
    if inner == "pre_mlp_layernorm.weight":
        return whole(f"{block}.feed_forward_norm.weight")
    if inner == "self_attention.linear_qkv.weight":
        query, key, value = (whole(f"{block}.attention.{kind}.weight") for kind in ("query", "key", "value"))
        grouped = [x.view(dims.kv_heads, -1, x.shape[1]) for x in (query, key, value)]
        return cut.rows(torch.cat(grouped, dim=1).flatten(0, 1))
    if inner == "mlp.linear_fc1.weight":
        halves = (whole(f"{block}.feed_forward.{kind}.weight") for kind in ("gate", "up"))
        return torch.cat([cut.rows(half) for half in halves])
    if inner == "self_attention.linear_proj.weight":
        return cut.columns(whole(f"{block}.attention.output.weight"))
    if inner == "mlp.linear_fc2.weight":
        return cut.columns(whole(f"{block}.feed_forward.down.weight"))
    raise ValueError(f"Megatron's model has a parameter that is not known here: {name}")


class _Cut:
    """One rank's part of a matrix."""

    def __init__(self, rank: int, of: int) -> None:
        self._rank, self._of = rank, of

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(self._of, dim=0)[self._rank]

    def columns(self, x: Tensor) -> Tensor:
        return x.chunk(self._of, dim=1)[self._rank]
