"""The kernel of `sums`: imported where a GPU runs it, since only there triton is sure to be."""
# ruff: noqa: ANN001 - arguments of a kernel are triton's own types

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor


def launch_sum(
    first: Tensor,
    others: Tensor,
    target: Tensor,
    rows: int,
    block: int,
    squares: Tensor | None = None,
) -> None:
    """`target` (n,) becomes `first` (n,) and the rows of `others` (rows * n,), added in fp32 and then in its own type.

    `squares` (ceil(n / block),) becomes the sums of squares of each block of what was added, in fp32.
    """
    count = target.numel()
    _sum_rows[(triton.cdiv(count, block),)](
        first,
        others,
        target,
        target if squares is None else squares,
        count,
        rows=rows,
        adds=squares is not None,
        block=block,
        num_warps=8,
    )


@triton.jit
def _sum_rows(
    first, others, target, squares, count, rows: tl.constexpr, adds: tl.constexpr, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    for row in tl.static_range(rows):
        total += tl.load(others + at + row * tl.cast(count, tl.int64), mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, total.to(target.dtype.element_ty), mask=inside)
    if adds:
        tl.store(squares + tl.program_id(0), tl.sum(total * total))
