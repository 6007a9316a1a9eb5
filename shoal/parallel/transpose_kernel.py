"""The kernel of `transpose`: imported where a GPU runs it, since only there triton is sure to be."""

from __future__ import annotations

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor


def launch(source: Tensor, target: Tensor, tile: int) -> None:
    """`target` (N, M) becomes the transposed `source` (M, N); both contiguous, a byte an element."""
    rows, columns = source.shape
    tiles = triton.cdiv(rows, tile) * triton.cdiv(columns, tile)
    _transpose[(tiles,)](source, target, rows, columns, tile=tile, num_warps=8)


@triton.jit
def _transpose(source, target, rows, columns, tile: tl.constexpr) -> None:  # noqa: ANN001 - triton's own types
    number = tl.program_id(0)
    across = tl.cdiv(columns, tile)
    row = ((number // across) * tile + tl.arange(0, tile)).to(tl.int64)
    column = ((number % across) * tile + tl.arange(0, tile)).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    inside_turned = (column[:, None] < columns) & (row[None, :] < rows)
    part = tl.load(source + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(target + column[:, None] * rows + row[None, :], tl.trans(part), mask=inside_turned)
