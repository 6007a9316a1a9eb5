"""Memory that kernels of a GPU take from the allocator for themselves, which no operator shows.

Each formula is read off ATen's source and was measured on H100s: with them, simulated and real peaks of eager steps were equal.
That of flash-attention 4 is read off its source alone; its kernels round rows to 64, 80 or 128 by heads' width, here all to 128.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.parallel import flash

aten: Any = torch.ops.aten
MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def blas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What cuBLAS keeps for good, for each thread's handle and stream (CUDABlas: getChosenWorkspaceSize)."""
    return 32 << 20 if capability >= (9, 0) else (2 * 4096 + 8 * 16) << 10


def scratch_bytes(operator: Any, args: tuple[Any, ...]) -> list[int]:
    """Sizes of what a kernel allocates inside of itself and frees when it returns."""
    if operator is aten._scaled_dot_product_flash_attention_backward.default:
        if flash.is_active() and flash.takes(*args[1:4], dropout_p=args[10]):
            return _flash_4_backward(args[1], args[2])
        return _flash_backward(args[1], args[2])
    if operator is aten.embedding_dense_backward.default and args[1].numel() > 3072:
        return _embedding_backward(args[0], args[1])
    return []


def _flash_backward(query: Tensor, key: Tensor) -> list[int]:
    """Sums of the queries' gradients and of rows in fp32, and gradients of keys and values for each query head."""
    samples, heads, length, width = query.shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    found = [samples * heads * rows * columns * 4, samples * heads * rows * 4]
    if key.shape[1] != heads:
        found += [key.shape[0] * heads * key.shape[2] * width * query.element_size()] * 2
    return found


def _flash_4_backward(query: Tensor, key: Tensor) -> list[int]:
    """Sums of the queries' gradients in fp32, two numbers a row, and where query heads share keys, sums of theirs."""

    def rows(x: Tensor) -> int:
        return -(-x.shape[2] // 128) * 128

    width = -(-query.shape[3] // 32) * 32
    heads = query.shape[0] * query.shape[1] * rows(query)
    found = [heads * width * 4, heads * 4, heads * 4]
    if key.shape[1] != query.shape[1]:
        found += [key.shape[0] * key.shape[1] * rows(key) * width * 4] * 2
    return found


def _embedding_backward(gradient: Tensor, indices: Tensor) -> list[int]:
    """Indices are sorted, in and out; and sums of segments are kept in fp32."""
    count, width = indices.numel(), gradient.shape[-1]
    sorting = count * indices.element_size()
    return [sorting, sorting, sorting + 2 * count, count * 4 * (-(-width // 32) * 32)]
