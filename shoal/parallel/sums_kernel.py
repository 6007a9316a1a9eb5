"""The kernel of `sums`: imported where a GPU runs it, since only there triton is sure to be."""

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK = 4096  # elements: 16 bytes read at once by each of 256 threads, two to four times


def launch_sum(first: Tensor, others: Tensor, target: Tensor, rows: int) -> None:
    """`target` (n,) becomes `first` (n,) and the rows of `others` (rows * n,), added in fp32 and then in its own type."""
    count = target.numel()
    _sum_rows[(triton.cdiv(count, BLOCK),)](first, others, target, count, rows=rows, block=BLOCK, num_warps=8)


@triton.jit
def _sum_rows(first, others, target, count, rows: tl.constexpr, block: tl.constexpr) -> None:  # noqa: ANN001 - triton's own types
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    for row in tl.static_range(rows):
        total += tl.load(others + at + row * tl.cast(count, tl.int64), mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, total.to(target.dtype.element_ty), mask=inside)
