"""The kernels of `entropy`: imported where a GPU runs them, since only there triton is sure to be."""
# ruff: noqa: ANN001 - arguments of a kernel are triton's own types

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

READ, WRITTEN = 4096, 2048
"""logits that a program of 4 warps has at a time; on an H200 no other from 1,024 to 16,384, by 4 to 32 warps, was 1 % faster"""


def launch_losses(logits: Tensor, labels: Tensor, losses: Tensor, lse: Tensor, ignore: int) -> None:
    """Of logits (N, V), whose rows may be apart, each row's loss, and the logarithm of its sum of exponentials; 0 where ignored.

    Both are (N,), in fp32.
    """
    rows, width = logits.shape
    block = min(READ, triton.next_power_of_2(width))
    _cross_entropy_losses[(rows,)](
        logits, labels, losses, lse, logits.stride(0), width, ignore, block=block, num_warps=4
    )


def launch_gradients(
    logits: Tensor, labels: Tensor, lse: Tensor, gradient: Tensor, found: Tensor, ignore: int
) -> None:
    """`found` (N, V) becomes the gradient of the sum of losses times `gradient`, a scalar in fp32."""
    rows, width = logits.shape
    block = min(WRITTEN, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _cross_entropy_gradients[grid](
        logits, labels, lse, gradient, found, logits.stride(0), width, ignore, block=block, num_warps=4
    )


@triton.jit
def _cross_entropy_losses(logits, labels, losses, lse, apart, width, ignore, block: tl.constexpr) -> None:
    row = tl.program_id(0)
    label = tl.load(labels + row)
    if label == ignore:
        tl.store(losses + row, 0.0)
        tl.store(lse + row, 0.0)
    else:
        first = logits + row.to(tl.int64) * apart
        top = -float("inf")
        total = 0.0
        for start in range(0, width, block):
            at = start + tl.arange(0, block)
            x = tl.load(first + at, mask=at < width, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x))
            # of a block of infinities alone nothing is added
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base))
            top = higher
        found = top + tl.log(total)
        known = (label >= 0) & (label < width)
        own = tl.load(first + label, mask=known, other=float("nan")).to(tl.float32)
        tl.store(losses + row, found - own)
        tl.store(lse + row, tl.where(known, found, float("nan")))  # and so the row's gradient


@triton.jit
def _cross_entropy_gradients(
    logits, labels, lse, gradient, found, apart, width, ignore, block: tl.constexpr
) -> None:
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    row_wide = row.to(tl.int64)
    label = tl.load(labels + row)
    factor = tl.where(label == ignore, 0.0, tl.load(gradient))
    x = tl.load(logits + row_wide * apart + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(lse + row)) - tl.where(at == label, 1.0, 0.0)
    share = tl.where(label == ignore, 0.0, share * factor)
    tl.store(found + row_wide * width + at, share.to(found.dtype.element_ty), mask=inside)
