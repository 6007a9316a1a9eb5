"""Rows sorted by the group that they belong to: put in order, and multiplied by their group's matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.simulated import is_simulated


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each row of `x` times its group's matrix: x_i @ weight[group of i].T.

    Every matrix takes part, with gradient zero if its group has no rows.

    Args:
        x: (N, K), sorted by group.
        weight: (groups, M, K).
        counts: (groups,) rows of each group; they add up to N.

    Returns:
        (N, M)
    """
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    return _one_by_one(x, weight, counts)


@torch.compiler.disable  # numbers of rows would be compiled in, and be others in the next step
def _one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = x.split(rows_of(counts, len(x)))
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(0), strict=True)])


def rows_of(counts: Tensor, rows: int) -> list[int]:
    """The number of rows of each group; waits for the device. In a simulated world groups have as many as each other.

    Args:
        counts: (groups,) whole numbers that add up to `rows`.
    """
    if is_simulated():
        every, more = divmod(rows, len(counts))
        return [every + (group < more) for group in range(len(counts))]
    return counts.tolist()


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether one launch does all groups: in bf16, on GPUs, for rows of whole 16 bytes. It takes no empty `x`."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and aligned and x.shape[0] > 0


def take_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Rows `order` of `x`, each of whose rows is there `copies` times: `x.repeat_interleave(copies, 0)[order]`.

    `order` has each place once, so that gradients are gathered by its inverse, and not added up in an order that changes from
    run to run, as those of an index are on GPUs.

    Args:
        x: (N, D). order, inverse: (N * copies,) permutations.

    Example:
        >>> order = torch.tensor([2, 0, 3, 1])
        >>> take_rows(torch.tensor([[5.0], [7.0]]), order, order.argsort(), copies=2).flatten().tolist()
        [7.0, 5.0, 7.0, 5.0]
    """
    return _TakeRows.apply(x, order, inverse, copies)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        back = gradients[0].index_select(0, inverse)
        if ctx.copies > 1:
            back = back.view(-1, ctx.copies, back.shape[-1]).sum(1)
        return back, None, None, None
