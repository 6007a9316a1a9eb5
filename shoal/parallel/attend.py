"""Attention on one block of keys, with the logarithm of its softmax's denominator, so that blocks can be merged.

torch's `scaled_dot_product_attention` keeps that number to itself; the operators below it, which are what torch's own context
parallelism is built on, give it. They are behind two functions here. Shapes: B samples, H heads, T queries, S keys, E width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)


class Attended(NamedTuple):
    """`out` (B, H, T, E), and `lse` (B, H, T), the log of the sum of exponentials of a row's scores."""

    out: Tensor
    lse: Tensor
    state: tuple[Tensor, Tensor] | None = None
    """what the kernel on GPUs wants back in backward (the random state of dropout, which there is none of)"""


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Attended:
    """Attention of all queries to all keys, or with `causal` (T = S) to those that are not later."""
    key, value = _expanded(query, key), _expanded(query, value)
    if query.device.type == "cpu":
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return Attended(*operator(query, key, value, 0.0, causal))
    if query.dtype in HALF_TYPES and _has_cudnn(query):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)
        return Attended(found[0], found[1].view(query.shape[:3]), (found[6], found[7]))
    if query.dtype in HALF_TYPES:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
        return Attended(found[0], found[1], (found[6], found[7]))
    return _attend_plainly(query, key, value, causal)


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of one block.

    Args:
        whole: the merged output over all blocks: with it each block's gradient is its part of the whole one.
    """
    wide_key, wide_value = _expanded(query, key), _expanded(query, value)
    if query.device.type == "cpu":
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = operator(gradient, query, wide_key, wide_value, whole.out, whole.lse, 0.0, causal)
    elif query.dtype in HALF_TYPES and _has_cudnn(query):
        found = _cudnn_backward(gradient, query, wide_key, wide_value, whole, causal)
    elif query.dtype in HALF_TYPES:
        found = _flash_backward(gradient, query, wide_key, wide_value, whole, causal)
    else:
        found = _plain_backward(gradient, query, wide_key, wide_value, whole, causal)
    return found[0], _summed(found[1], key), _summed(found[2], value)


def merge(one: Attended, other: Attended) -> Attended:
    """Attention to the keys of both blocks; `one` is kept in a wide type."""
    lse = torch.logaddexp(one.lse, other.lse.to(one.lse.dtype))
    mine, theirs = (one.lse - lse).exp()[..., None], (other.lse - lse).exp()[..., None]
    return Attended(one.out * mine + other.out * theirs, lse)


def _has_cudnn(query: Tensor) -> bool:
    """Whether cuDNN's kernel, on Hopper about twice as fast as the flash kernel, takes the inputs."""
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 128
    return (
        fits
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
    )


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths = (query.shape[2], key.shape[2])
    batch = (gradient, query, key, value, whole.out, whole.lse[..., None])
    # None: no bias, and sequences of one length, not packed ones
    return operator(*batch, *(whole.state or ()), None, None, None, *lengths, 0.0, causal)


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = (query.shape[2], key.shape[2])
    batch = (gradient, query, key, value, whole.out, whole.lse)
    # None: sequences of one length, not packed ones
    return operator(*batch, None, None, *lengths, 0.0, causal, *(whole.state or ()))


def _expanded(query: Tensor, x: Tensor) -> Tensor:
    """Key/value heads as many times as query heads share them."""
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of `_expanded`."""
    times = gradient.shape[1] // x.shape[1]
    return gradient if times == 1 else gradient.unflatten(1, (-1, times)).sum(2)


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Attended:
    scores = _scores(query, key, causal)
    return Attended(scores.softmax(-1) @ value, scores.logsumexp(-1))


def _plain_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(query, key, causal) - whole.lse[..., None]).exp()
    inner = (gradient * whole.out).sum(-1, keepdim=True)
    scores = weights * (gradient @ value.transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
    return scores @ key, scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
