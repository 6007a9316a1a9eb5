"""One rank of `benchmarks/reality_measure.py`: takes the steps of one plan after the other, in one process."""

from __future__ import annotations

import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.axes_rank import model_of, random_batch
from shoal.bench.rank import LEAST_WARMUP, Course
from shoal.config import Settings, parse
from shoal.data.cut import StepBatch
from shoal.launch.worker import StopFlag
from shoal.observe.metrics import GIB, memory_bytes, reserved_bytes
from shoal.observe.status import RankStatus
from shoal.parallel.apply import parallelize
from shoal.train.objective import NextToken
from shoal.train.pauses import Pauses
from shoal.train.setup import Training
from shoal.train.step import Step
from shoal.world import World

ASKED = "rows.json"
HOT_S = 3.0  # before a row's steps count; rows follow each other, so that devices are warm
STEPS = 8
DIFFERENT = 4  # batches, which come again
MOST_LEFT = (
    1 << 30
)  # bytes of a device that a row may leave behind for the next one to begin in the same processes
LEFT = "left_gib"
"""what is told of a row after which the processes are no longer used"""


def measure(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Every row of the run directory's list; its file of results gets a line for each when it is there."""
    asked = json.loads((Path(settings.run.dir) / ASKED).read_text())
    until, first = time.monotonic() + asked["limit_s"], 0.0
    for name, tables in asked["rows"]:
        ends = stop.requested or time.monotonic() > until
        if _most([float(ends)], world)[0]:
            return
        status.enter("setup", 0)
        began = time.monotonic()
        found = _row(parse(tables, where=name), world, status)
        _forget(world)
        used = _most([float(_used(world))], world)[0]
        first = first or used  # contexts, libraries and communicators stay
        stops = bool(_most([float(stop.requested)], world)[0])
        if used - first > MOST_LEFT and not stops:
            found[LEFT] = _gib(used - first)
        if world.is_main:
            found |= {"seconds": round(time.monotonic() - began, 1)}
            with Path(asked["found"]).open("a") as file:
                file.write(json.dumps({"name": name} | found) + "\n")
        world.barrier("a row")
        if stops or LEFT in found:
            return


def _row(settings: Settings, world: World, status: RankStatus) -> dict[str, Any]:
    job, plan = settings.job, settings.plan
    if plan is None:
        raise ValueError("rows say their plan")
    before = _held(world)
    build, _ = model_of(job)
    model = parallelize(build, plan, world, precision=job.train.precision)
    step = Step(
        model,
        NextToken(compiled=plan.compiles(world.device.type) is not None),
        job.optimizer,
        plan,
        world,
        precision=job.train.precision,
        total_steps=1 << 30,
        usual_weight=job.train.global_batch * job.data.seq_len,
        on_phase=status.enter,
    )
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    parts = SimpleNamespace(step=step, world=world, status=status)  # what a course has use for
    with Pauses() as pauses:
        course = Course(cast(Training, parts), _batches(settings, world), pauses)
        course.take(LEAST_WARMUP)
        course.take(_number(HOT_S / course.seconds[-1], world))
        warmup = len(course.seconds)
        course.take(STEPS)
    seconds = course.seconds[warmup:]
    allocated = memory_bytes(world.device, step.shared_bytes) - before
    # what rows before left in torch's cache serves this one
    reserved = (reserved_bytes(world.device, step.shared_bytes) or 0) - before
    slowest, most_allocated, most_reserved = _most(
        [statistics.median(seconds), float(allocated), float(reserved)], world
    )
    return {
        "step_s": round(slowest, 5),
        "steps_s": [round(value, 5) for value in seconds],
        "allocated_gib": _gib(most_allocated),
        "reserved_gib": _gib(most_reserved),
        "losses": [round(loss, 4) for loss in course.losses[:LEAST_WARMUP]],
    }


def _batches(settings: Settings, world: World) -> Iterator[StepBatch]:
    """A few, over and over: making them takes the host longer than a small model's step."""
    assert settings.plan is not None
    kept = [random_batch(settings, settings.plan, world, number) for number in range(DIFFERENT)]
    return (kept[number % DIFFERENT]._replace(step=number) for number in itertools.count())


def _forget(world: World) -> None:
    """Give everything of a row back."""
    gc.collect()
    torch.compiler.reset()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # there is no public way; a row of its own process would make its own
        torch.cuda.empty_cache()


def _used(world: World) -> int:
    """Bytes of the device that are in use, also such as other ranks read, of which torch's allocator does not know."""
    if world.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(world.device)
    return total - free


def _held(world: World) -> int:
    """Bytes that tensors have of the device."""
    return torch.cuda.memory_allocated(world.device) if world.device.type == "cuda" else 0


def _number(steps: float, world: World) -> int:
    """So many on all ranks."""
    return max(1, math.ceil(_most([steps], world)[0])) if world.device.type == "cuda" else 1


def _most(values: list[float], world: World) -> list[float]:
    mine = torch.tensor(values, dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.tolist()


def _gib(count: float) -> float:
    return round(count / GIB, 3)
