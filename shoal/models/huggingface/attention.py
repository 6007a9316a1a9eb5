"""The attention that transformers' models call, through their own interface for it.

One function does what masks of transformers are for: causality, windows, documents. So a model needs no mask of its own, and the
same forward is right on whole sequences and on parts of heads. Shapes: B samples, H heads, T tokens, E width of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "shoal"
"""how configurations call it"""


def layers_it_knows(config: Any) -> bool:
    """Whether all layers attend to all earlier tokens, or to a window of them."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    chunked = getattr(config, "attention_chunk_size", None)
    return kinds <= {"full_attention", "sliding_attention"} and not chunked


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Stands for "attend as one process does" until context parallelism replaces it."""
    raise RuntimeError("`plain` says that attention is not replaced; it is not called")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of (B, H, T, E) to (B, K, T, E), as (B, T, H, E).

    Args:
        attention_mask: (B, 1, T, T), true where a token may look; left out: at all before it.
    """
    unknown = [name for name in ("position_bias", "s_aux") if others.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} attends with {unknown[0]}, which this version does not do")
    attend: Any = getattr(module, "attend", plain)
    if attend is not plain:
        width = query.shape[-1]
        if scaling is not None and scaling != width**-0.5:
            query = query * (scaling * math.sqrt(width))
        return attend(query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    mask = _windowed(attention_mask, sliding_window, query.shape[2], query.device)
    if softcap is not None:
        mixed = _capped(query, key, value, mask, dropout, scaling, softcap)
    else:
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return mixed.transpose(1, 2).contiguous(), None


def _windowed(mask: Tensor | None, window: int | None, length: int, device: torch.device) -> Tensor | None:
    """A mask whose tokens see only the `window` last ones, their own among them."""
    if window is None or window >= length:
        return mask
    near = torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
    return near if mask is None else mask & near


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    cap: float,
) -> Tensor:
    """Attention whose scores are kept below `cap` by a tanh, as Gemma 2's are; no kernel of torch's does it."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / cap).tanh() * cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=wide).to(query.dtype)
    return F.dropout(weights, dropout) @ value
