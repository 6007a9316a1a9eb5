"""The kernel of `gather8`: imported where a GPU runs it, since only there triton is sure to be."""

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

BLOCK = 4096  # elements: 16 bytes read at once by each of 256 threads, four times


def launch(source: Tensor, scale: Tensor, target: Tensor) -> None:
    """`target` becomes `source` (fp32, contiguous) times `scale`, in e4m3; what is too large becomes 448."""
    count = source.numel()
    _narrow[(triton.cdiv(count, BLOCK),)](source, scale, target, count, block=BLOCK, num_warps=8)


@triton.jit
def _narrow(source, scale, target, count, block: tl.constexpr) -> None:  # noqa: ANN001 - triton's own types
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    numbers = tl.load(source + at, mask=at < count, other=0.0) * tl.load(scale)
    # a comparison with NaN is false, so that NaN stays NaN
    numbers = tl.where(numbers > 448.0, 448.0, numbers)
    numbers = tl.where(numbers < -448.0, -448.0, numbers)
    tl.store(target + at, numbers.to(tl.float8e4nv), mask=at < count)
