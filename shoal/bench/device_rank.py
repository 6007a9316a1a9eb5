"""One rank of `shoal bench device`: measures its device, and with the other ranks the links between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench import device_collectives, device_host, device_kernels, device_steps
from shoal.bench.ask import read_seconds, write_answer
from shoal.bench.device_sizes import Sizes, sizes_for
from shoal.bench.stopwatch import Left, Part, Stopwatch, take_turns, visit
from shoal.cluster import DEVICES
from shoal.config import Settings
from shoal.launch.worker import StopFlag
from shoal.observe.machine import facts
from shoal.observe.status import RankStatus
from shoal.parallel.reach import find_peers
from shoal.run import Run
from shoal.world import World, detect_cluster


def measure(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Measure for as long as is asked, and leave an answer. Collective."""
    stop.patient = False  # a signal ends it at once: there is nothing to save
    run = Run(Path(settings.run.dir))
    seconds, began = read_seconds(run), time.monotonic()

    def on_part(name: str, share_s: float) -> None:
        status.enter(name, 0)
        if world.is_main:
            print(f"{name} ({share_s:.1f} s)", file=sys.stderr, flush=True)

    answer = measure_all(world, sizes_for(world.device.type), seconds, on_part)
    if world.device.type == "cuda" and detect_cluster().device.kind in DEVICES:  # others are not simulated
        answer["steps"] = _steps(world, run, status)
    answer["took_s"] = time.monotonic() - began
    if world.is_main:
        answer["about"] = facts()
        run.event("end", step=0)  # tells the launcher that nobody stopped it
    write_answer(run, world.rank, answer)
    world.barrier("the end")


def _steps(world: World, run: Run, status: RankStatus) -> dict[str, float]:
    """Seconds of a small model's, by how they are launched."""
    found = {}
    for how in device_steps.KINDS:
        status.enter(f"{how} steps of a small model", 0)
        found[how] = device_steps.step_s(world, run, status, how)
        if world.is_main:
            print(f"{how} steps of a small model: {1e3 * found[how]:.1f} ms", file=sys.stderr, flush=True)
    return found


def measure_all(
    world: World, sizes: Sizes, seconds: float, on_part: Callable[[str, float], None]
) -> dict[str, Any]:
    """What this rank measured in about `seconds`, as `Profile` has it. Collective."""

    def agree(number: float) -> float:
        """On the CPU also where devices are GPUs, which need not stop for it."""
        most = torch.tensor(number, dtype=torch.float64)
        if world.size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()

    began = time.monotonic()
    bench = Bench(world, sizes, Stopwatch(world.device, agree))
    left_s = agree(seconds - (time.monotonic() - began))
    take_turns(bench.parts(), left_s, agree, on_part)
    return bench.found


class Bench:
    """What is measured, part by part, and what was found."""

    def __init__(self, world: World, sizes: Sizes, stopwatch: Stopwatch) -> None:
        self._world, self._sizes, self._watch = world, sizes, stopwatch
        self.found: dict[str, Any] = {
            "matmuls": [],
            "attention": [],
            "moves": [],
            "collectives": {},
            "host_copies": [],
        }

    def parts(self) -> list[Part]:
        """Those that this device has. The host is last: its compiler takes as long as it takes, at no other's cost."""
        ranks, on_gpu = self._world.size, self._world.device.type == "cuda"
        heating = Part("heating", 15, lambda left_s: self._watch.heat(left_s()))
        parts = [*([heating] if on_gpu else []), *self._products()]
        if on_gpu:
            parts.append(Part("products without a pause", 5, self.hot))
        parts += [Part("attention", 15, self.attention), Part("element-wise kernels", 7, self.moves)]
        if on_gpu:
            parts.append(Part("copies from the host", 4, self.copies))
        if ranks > 1:
            parts.append(Part("connecting", 5, self.connect))
        for size in device_collectives.group_sizes(ranks):
            for kind in device_collectives.KINDS:
                parts.append(Part(f"{kind} on {size} ranks", 4, partial(self.collective, kind, size)))
            if on_gpu:
                parts.append(Part(f"copy engines on {size} ranks", 4, partial(self.peers, size)))
        if on_gpu and ranks > 1:
            parts.append(Part("computing beside collectives", 4, self.beside))
        return [*parts, Part("host", 25, self.host)]

    def _products(self) -> list[Part]:
        """One part a type, as long as it has shapes."""
        shapes = self._sizes.products
        dtypes = device_kernels.dtypes_of(self._world.device, list(shapes))
        every = sum(len(shapes[dtype]) for dtype in dtypes)
        return [
            Part(f"{dtype} products", 40 * len(shapes[dtype]) / every, partial(self.products, dtype))
            for dtype in dtypes
        ]

    def host(self, left_s: Left) -> None:
        """A fixed number of samples: they are short, but for compiling."""
        kernel_s, graph_s = device_host.compiled_s(self._watch)
        self.found["host"] = {
            "operator_s": device_host.operator_s(self._watch),
            "kernel_s": kernel_s,
            "graph_s": graph_s,
            "collective_s": device_host.collective_s(self._watch),
        }

    def products(self, dtype: str, left_s: Left) -> None:
        """Adds to the products of other types."""

        def seconds(shape: tuple[int, int, int], share_s: float) -> float:
            return device_kernels.product_s(self._watch, dtype, *shape, share_s)

        found = visit(self._sizes.products[dtype], seconds, left_s)
        self.found["matmuls"] += [[dtype, *shape, took_s] for shape, took_s in found]

    def hot(self, left_s: Left) -> None:
        """By how much products take longer than in the samples above."""
        self.found["hot"] = device_kernels.hot(self._watch, left_s())

    def attention(self, left_s: Left) -> None:
        """All shapes, in one type."""
        dtype = self._sizes.attention_dtype
        found = visit(self._sizes.attention, partial(device_kernels.attention_s, self._watch, dtype), left_s)
        self.found["attention"] = [[dtype, *shape, *both] for shape, both in found]

    def moves(self, left_s: Left) -> None:
        """A curve."""
        self.found["moves"] = visit(
            self._sizes.moves, partial(device_kernels.move_s, self._watch, self._sizes.dtype), left_s
        )

    def copies(self, left_s: Left) -> None:
        """A curve."""
        self.found["host_copies"] = visit(
            self._sizes.copies, partial(device_kernels.copy_s, self._watch), left_s
        )

    def connect(self, left_s: Left) -> None:
        """Use each kind in each group once: what it opens then can take a second."""
        for size in device_collectives.group_sizes(self._world.size):
            group = device_collectives.group_of(self._world, size)
            for kind in device_collectives.KINDS:
                device_collectives.prepared(self._watch, kind, group, self._sizes.dtype, 2**12)()
        self._watch.wait()

    def collective(self, kind: str, size: int, left_s: Left) -> None:
        """A curve of one kind on groups of one size."""
        group, dtype = device_collectives.group_of(self._world, size), self._sizes.dtype
        sizes = [device_collectives.whole_bytes(about, size, dtype) for about in self._sizes.collectives]
        seconds = partial(device_collectives.collective_s, self._watch, kind, group, dtype)
        self.found["collectives"][f"{kind}/{size}"] = visit(sizes, seconds, left_s)

    def peers(self, size: int, left_s: Left) -> None:
        """Curves of gathers by copy engines on groups of one size, where the ranks of all groups reach each other's memory."""
        dtype = self._sizes.dtype
        group = device_collectives.group_of(self._world, size)
        peers = find_peers(group, self._world, wanted=None)
        if self._watch.agree(float(peers is None)) or peers is None:
            return
        sizes = [device_collectives.whole_bytes(about, size, dtype) for about in self._sizes.collectives]
        for kind, measure in device_collectives.BY_COPIES.items():
            seconds = partial(measure, self._watch, peers, group, dtype)
            self.found["collectives"][f"{kind}/{size}"] = visit(sizes, seconds, left_s)

    def beside(self, left_s: Left) -> None:
        """Between all ranks."""
        group = device_collectives.group_of(self._world, self._world.size)
        self.found["beside"] = device_collectives.slow_downs(self._watch, group, self._sizes, left_s())
