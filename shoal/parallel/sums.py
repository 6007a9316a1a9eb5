"""Casts and sums of what ranks send each other, at the rate of a GPU's memory: by kernels of ours on NVIDIA GPUs, else by torch.

torch's own cast from fp32 to bf16 and back reaches less than half of it (benchmarks/notes.md).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.simulated import is_simulated

LEAST = 1 << 20  # elements from which a cast of its own is worth it
BLOCK = 4096  # elements that a program of the kernel adds up: 16 bytes read at once by each of 256 threads, two to four times
KINDS = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def cast_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each target becomes its source, in the target's type; one-dimensional, without gaps.

    Example:
        >>> target = torch.empty(2, dtype=torch.bfloat16)
        >>> cast_into([target], [torch.tensor([1.0, 2.0])])
        >>> target.tolist()
        [1.0, 2.0]
    """
    rest = []
    for target, source in zip(targets, sources, strict=True):
        if target.dtype != source.dtype and target.numel() >= LEAST and _has_kernel(target, source):
            from shoal.parallel.sums_kernel import launch_sum

            launch_sum(source, source, target, 0, BLOCK)
        else:
            rest.append((target, source))
    if rest:
        torch._foreach_copy_([target for target, _ in rest], [source for _, source in rest])


@torch.no_grad()
def sum_parts(first: Tensor, others: Tensor, total: Tensor, squares: Tensor) -> None:
    """`total` (n,) becomes `first` (n,) and the rows of `others` (rows * n,), added in its own type and this order.

    `squares` (`blocks_of(n)`,), fp32, becomes numbers whose sum is that of the squares of `total`.

    Example:
        >>> total, squares = torch.empty(2), torch.empty(blocks_of(2))
        >>> sum_parts(torch.tensor([1, 2]).half(), torch.tensor([3, 4, 5, 6]).half(), total, squares)
        >>> total.tolist(), squares.tolist()
        ([9.0, 12.0], [225.0])
    """
    if _has_kernel(total, first):
        from shoal.parallel.sums_kernel import launch_sum

        launch_sum(first, others, total, others.numel() // total.numel(), BLOCK, squares)
        return
    if is_simulated():  # one kernel reads it all; in fact torch would add in 16 bits, or make a copy
        torch.sum(others.view(-1, total.numel()), 0, dtype=total.dtype, out=total)
        return
    total.copy_(first)
    for row in others.view(-1, total.numel()).unbind():
        total.add_(row)
    squares.zero_()[:1] = total.double().square_().sum()


def blocks_of(count: int) -> int:
    """Sums of squares that `sum_parts` gives for so many elements."""
    return -(-count // BLOCK)


def _has_kernel(target: Tensor, source: Tensor) -> bool:
    return (
        target.is_cuda
        and source.is_cuda
        and target.dtype in KINDS
        and source.dtype in KINDS
        and not is_simulated()
        and has_triton()
    )


@functools.cache
def has_triton() -> bool:
    """Whether kernels written in triton can run on a GPU of NVIDIA."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None
