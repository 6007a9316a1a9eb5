"""One rank of `shoal bench step`: takes the job's own steps as a run does, and says how long each took."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.ask import read_ask, write_answer
from shoal.bench.profile import Phases, profile_step
from shoal.config import Settings
from shoal.data.batches import batches
from shoal.data.cut import StepBatch
from shoal.launch.worker import StopFlag
from shoal.observe.machine import facts
from shoal.observe.metrics import memory_bytes, reserved_bytes
from shoal.observe.status import RankStatus
from shoal.run import Run
from shoal.train.loop import Clock
from shoal.train.pauses import Pauses
from shoal.train.result import StepResult
from shoal.train.setup import Training, set_up
from shoal.train.tell import whole_parameters
from shoal.world import World

LEAST_WARMUP = 3  # steps: compilation, autotuning, the allocator's first rounds
HOT_S = 8.0  # H100s give 15 to 20 % more in their first second than after some, when their power is capped


def measure(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Time the steps that are asked for, then profile one, and leave an answer. Collective."""
    run = Run(Path(settings.run.dir))
    ask = read_ask(run)
    world.agree("job", settings.to_toml())
    status.enter("setup", 0)
    phases = Phases(status.enter)
    began = time.perf_counter()
    training = set_up(settings, world, run, status, on_phase=phases.enter)
    setup_s = time.perf_counter() - began
    _forget_setup(world)
    with closing(feed(training)) as batches_of_job, Pauses() as pauses:
        course = Course(training, batches_of_job, pauses)
        warmup = course.warm_up(ask.warmup)
        window = course.take(ask.steps)
        answer = course.answer(warmup, window) | {"setup_s": setup_s}
        answer["memory"] = {
            "allocated": memory_bytes(world.device, training.step.shared_bytes),
            "reserved": reserved_bytes(world.device, training.step.shared_bytes),
        }
        if ask.traces is not None:
            found = profile_step(training.step, course.next_batch, phases, world, Path(ask.traces))
            answer["profile"] = found._asdict()
    if world.is_main:
        answer["about"] = _about(training)
        run.event("end", step=len(answer["losses"]))  # tells the launcher that nobody stopped it
    write_answer(run, world.rank, answer)
    world.barrier("the end")


class Course:
    """Steps one after the other, as `train` takes them: on a GPU numbers are read while the next step runs."""

    def __init__(self, training: Training, feed: Iterator[StepBatch], pauses: Pauses) -> None:
        self._training, self._feed, self._pauses = training, feed, pauses
        self._clock, self._unread = Clock(training.world.device), list[StepResult]()
        self._ahead = int(training.world.device.type == "cuda")
        self.waits: list[float] = []
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def warm_up(self, steps: int | None) -> int:
        """Take so many steps, or LEAST_WARMUP and on a GPU as many more as last HOT_S seconds; the number of them."""
        self.take(LEAST_WARMUP if steps is None else steps)
        if steps is None and self._ahead:
            self.take(math.ceil(HOT_S / _most(self.seconds[-1], self._training.world)))
        return len(self.seconds)

    def take(self, steps: int) -> tuple[float, float]:
        """Take steps and read all their numbers; seconds since the epoch when they began and ended."""
        began = time.time()
        for _ in range(steps):
            batch = self.next_batch()
            self._unread.append(self._training.step(batch, ahead=True))
            self._pauses.after_step(batch.step + 1)
            self._read(leave=self._ahead)
        self._read(leave=0)
        return began, time.time()

    def next_batch(self) -> StepBatch:
        """The next batch; the wait for it is noted.

        Raises:
            ValueError: the data has ended.
        """
        self._training.status.enter("data", len(self.waits))
        began = time.perf_counter()
        batch = next(self._feed, None)
        if batch is None:
            raise ValueError(
                f"the data ended after {len(self.waits)} steps; ask for fewer --steps and --warmup, or give more data"
            )
        self.waits.append(time.perf_counter() - began)
        return batch

    def answer(self, warmup: int, window: tuple[float, float]) -> dict[str, Any]:
        """What was measured; losses and norms of all steps, the warm-up's too."""
        return {
            "warmup": warmup,
            "window": window,
            "seconds": self.seconds[warmup:],
            "waits": self.waits[warmup:],
            "losses": self.losses,
            "grad_norms": self.norms,
        }

    def _read(self, leave: int) -> None:
        while len(self._unread) > leave:
            result = self._unread.pop(0)
            numbers = result.numbers  # waits for the step
            self.seconds.append(self._clock.lap(result))
            self.losses.append(numbers.loss)
            self.norms.append(numbers.grad_norm)


def feed(training: Training) -> Any:
    """Batches without an end: how many are needed is known when the devices are hot."""
    settings = training.settings
    return batches(
        training.datasets.train,
        settings.job,
        training.plan,
        training.world,
        stop=1 << 40,
        deadline_s=settings.run.deadline_s,
    )


def _forget_setup(world: World) -> None:
    """Memory that is told is that of steps."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)


def _most(seconds: float, world: World) -> float:
    """The most over all ranks, so that they take equally many steps."""
    most = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return max(most.item(), 1e-6)


def _about(training: Training) -> dict[str, Any]:
    """What the figures are figures of."""
    rates = training.rates
    return {
        "machine": facts(),
        "plan": training.plan.describe(),
        "ranks": training.world.size,
        "device": training.world.device.type,
        "backend": training.world.backend,
        "parameters": whole_parameters(training),
        "unit": rates.unit,
        "units_per_step": rates.usual_weight,
        "flops_per_step": rates.flops_per_step,
        "peak_flops": rates.peak_flops,
    }
