"""What one device takes for matrix products, attention, element-wise work and copies from the host."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.bench.device_sizes import Shape
from shoal.bench.stopwatch import Call, Stopwatch
from shoal.parallel.float8 import OLDEST
from shoal.train.kernels import attention_kernels

FLOAT8 = "float8_e4m3fn"
# of a linear's products, as its matrices lie in memory: x W' forward, g W and g' x backward
LAYOUTS = ((False, True), (False, False), (True, False))


SUSTAINED = (8192, 14336, 4096)  # m, n, k: 0.96 TFLOP


class Both(NamedTuple):
    """Seconds of attention."""

    forward_s: float
    backward_s: float


def dtypes_of(device: torch.device, dtypes: list[str]) -> list[str]:
    """Those in which a device multiplies: float8 is left out where there is no kernel for it."""
    has_float8 = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= OLDEST
    )
    return [dtype for dtype in dtypes if dtype != FLOAT8 or has_float8]


def product_s(stopwatch: Stopwatch, dtype: str, m: int, n: int, k: int, left_s: float) -> float:
    """Seconds of a product, the median over the layouts that a linear's three products have."""
    calls = _float8_product if dtype == FLOAT8 else _products
    share_s = left_s if dtype == FLOAT8 else left_s / len(LAYOUTS)
    return statistics.median(
        stopwatch.median(call, share_s) for call in calls(stopwatch.device, dtype, m, n, k)
    )


def hot(stopwatch: Stopwatch, left_s: float) -> float:
    """By how much a linear's products take longer one after the other for seconds than with pauses between; at least 1.

    A GPU at the limit of its power computes the slower the less it pauses.
    """
    calls = list(_products(stopwatch.device, "bfloat16", *SUSTAINED))
    with_pauses = sum(stopwatch.median(call, left_s / 3 / len(calls)) for call in calls)
    return max(1.0, stopwatch.sustained(calls, left_s * 2 / 3) / with_pauses)


def _products(device: torch.device, dtype: str, m: int, n: int, k: int) -> Iterator[Call]:
    """A layout after the other. Random numbers, since products of zeros take less power, and so less time."""
    kind: torch.dtype = getattr(torch, dtype)

    def matrix(rows: int, columns: int, turned: bool) -> Tensor:
        if turned:
            return torch.randn(columns, rows, dtype=kind, device=device).t()
        return torch.randn(rows, columns, dtype=kind, device=device)

    def call(turn_a: bool, turn_b: bool) -> Call:
        a, b = matrix(m, k, turn_a), matrix(k, n, turn_b)
        return lambda: torch.mm(a, b)

    return (call(turn_a, turn_b) for turn_a, turn_b in LAYOUTS)


def _float8_product(device: torch.device, dtype: str, m: int, n: int, k: int) -> Iterator[Call]:
    """One layout: the kernel takes no other, and torchao copies matrices into it; sums as torchao's backward has them."""
    kind: torch.dtype = getattr(torch, dtype)
    a = torch.randn(m, k, dtype=torch.bfloat16, device=device).to(kind)
    b = torch.randn(n, k, dtype=torch.bfloat16, device=device).to(kind).t()
    scale = torch.ones((), device=device)
    # the operator under torch.nn.functional.scaled_mm, which torchao calls as well
    yield lambda: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=False)


def attention_s(stopwatch: Stopwatch, dtype: str, shape: Shape, left_s: float) -> Both:
    """Seconds of causal attention, forward with what it keeps for backward, and backward."""

    def heads(count: int) -> Tensor:
        size = (shape.batch, shape.length, count, shape.width)  # as projections leave it: heads are not apart
        kind: torch.dtype = getattr(torch, dtype)
        return torch.randn(size, dtype=kind, device=stopwatch.device).transpose(1, 2).requires_grad_()

    query, key, value = heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with attention_kernels(stopwatch.device):
        out = forward()
        gradient = torch.randn_like(out)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

        return Both(stopwatch.median(forward, left_s / 3), stopwatch.median(backward, left_s * 2 / 3))


def move_s(stopwatch: Stopwatch, dtype: str, size_bytes: int, left_s: float) -> float:
    """Seconds of an element-wise kernel that reads two tensors and writes one, `size_bytes` in all."""
    kind: torch.dtype = getattr(torch, dtype)
    x, y, z = (
        torch.ones(size_bytes // (3 * kind.itemsize), dtype=kind, device=stopwatch.device) for _ in range(3)
    )
    return stopwatch.median(lambda: torch.mul(x, y, out=z), left_s)


def copy_s(stopwatch: Stopwatch, size_bytes: int, left_s: float) -> float:
    """Seconds of a copy to the device from the host, from pinned memory if it is a GPU."""
    here = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=stopwatch.device.type == "cuda")
    there = torch.empty(size_bytes, dtype=torch.uint8, device=stopwatch.device)
    return stopwatch.median(lambda: there.copy_(here, non_blocking=True), left_s)
