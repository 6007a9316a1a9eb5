"""What the process that launches work needs for an operator, a compiled kernel, a compiled graph and a collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch._dynamo  # torch.compile's first call would: so it is imported before ranks are forked, once for all of them
import torch.distributed as dist
from torch import Tensor

from shoal.bench.stopwatch import Call, Stopwatch

OPERATORS = 50
LAYERS = 8
KERNELS_PER_LAYER = 2
COLLECTIVES = 20
SAMPLES = 9
LEAST_S = 1e-7  # differences of two times can come out as nothing
DIM = 64  # so small that a device is done before the host launches the next


def operator_s(stopwatch: Stopwatch) -> float:
    """Seconds of an eager operator with autograd, forward and backward alike."""
    leaf = torch.ones(DIM, device=stopwatch.device, requires_grad=True)

    def chain() -> None:
        x = leaf
        for _ in range(OPERATORS):
            x = x * 1.0
        x.backward(leaf.detach())

    return _host_s(stopwatch, chain) / (2 * OPERATORS)


def compiled_s(stopwatch: Stopwatch) -> tuple[float, float]:
    """Seconds of a kernel and of a call of compiled code, from calls with few kernels and with many."""
    x = torch.randn(DIM, DIM, device=stopwatch.device)
    weight = torch.randn(DIM, DIM, device=stopwatch.device, requires_grad=True)
    compiled = _compiled(stopwatch.device)
    few_s = _host_s(stopwatch, lambda: compiled(x, weight, 1))
    many_s = _host_s(stopwatch, lambda: compiled(x, weight, LAYERS))
    kernel_s = max((many_s - few_s) / (KERNELS_PER_LAYER * (LAYERS - 1)), LEAST_S)
    return kernel_s, max(few_s - KERNELS_PER_LAYER * kernel_s, LEAST_S)


def _compiled(device: torch.device) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Layers of two kernels that do not fuse: a product by the vendor's library, and an element-wise one.

    On a CPU the graph's operators are called one by one: it launches nothing, and a compiler would take longer than all the rest.
    """

    def layers(x: Tensor, weight: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.relu(x @ weight)
        return x

    backend = "eager" if device.type == "cpu" else "inductor"
    return torch.compile(layers, backend=backend, fullgraph=True, dynamic=False)


def collective_s(stopwatch: Stopwatch) -> float:
    """Seconds until a small collective is launched."""
    x = torch.zeros(DIM, device=stopwatch.device)
    works: list[dist.Work] = []

    def launch() -> None:
        works.extend(work for _ in range(COLLECTIVES) if (work := dist.all_reduce(x, async_op=True)))

    def finish() -> None:
        while works:
            works.pop().wait()

    return _host_s(stopwatch, launch, finish) / COLLECTIVES


def _host_s(stopwatch: Stopwatch, call: Call, after: Call = lambda: None) -> float:
    """The host's median for a call, after one that compiles and allocates; the device has nothing else to do."""
    samples = []
    for _ in range(SAMPLES + 1):
        stopwatch.wait()
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
        after()
    stopwatch.wait()
    return statistics.median(samples[1:])
