"""One rank of `benchmarks/axes.py`: times steps of a plan on random tokens and random weights."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.config import Settings
from shoal.data.cut import MicroBatch, StepBatch
from shoal.job import Job
from shoal.launch.worker import StopFlag
from shoal.models.llama import Llama
from shoal.models.moe import Moe
from shoal.models.moe_presets import resolve_moe
from shoal.models.presets import resolve
from shoal.observe.metrics import GIB, memory_bytes, reserved_bytes
from shoal.observe.status import RankStatus
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.run import write_whole
from shoal.train.flops import llama_flops_per_token, moe_flops_per_token
from shoal.train.objective import NextToken
from shoal.train.pauses import Pauses
from shoal.train.step import Step
from shoal.world import World, detect_cluster

WARMUP = 3
BLOCK = 1 << 20


class Quick:
    """Initial weights that repeat a block of random numbers: billions are there in seconds."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if tensor.dim() == 1:
            tensor.fill_(1.0)
            return
        block = torch.empty(min(BLOCK, tensor.numel())).normal_(0.0, 0.02, generator=generator)
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), BLOCK):
            part = flat[start : start + BLOCK]
            part.copy_(block[: part.numel()])


class QuickLlama(Quick, Llama):
    """For speed alone."""


class QuickMoe(Quick, Moe):
    """For speed alone."""


def model_of(job: Job) -> tuple[Callable[[], nn.Module], float]:
    """A builder of the row's model, and its operations for one token."""
    if job.model.family == "moe":
        moe = resolve_moe(job.model)
        return lambda: QuickMoe(moe), moe_flops_per_token(moe, job.data.seq_len)
    dims = resolve(job.model)
    return lambda: QuickLlama(dims), llama_flops_per_token(dims, job.data.seq_len)


def measure(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Time `train.steps` steps and write what came of it into the run directory."""
    job, plan = settings.job, settings.plan
    if plan is None:
        raise ValueError("the benchmark's rows say their plan")
    build, flops = model_of(job)
    status.enter("setup", 0)
    began = time.monotonic()
    model = parallelize(build, plan, world, precision=job.train.precision)
    compiled = plan.compiles(world.device.type) is not None
    step = Step(
        model,
        NextToken(compiled=compiled),
        job.optimizer,
        plan,
        world,
        precision=job.train.precision,
        total_steps=job.train.steps,
        usual_weight=job.train.global_batch * job.data.seq_len,
        on_phase=status.enter,
    )
    setup_s = time.monotonic() - began
    times, losses = [], []
    with Pauses() as pauses:
        for number in range(WARMUP + job.train.steps):
            batch = random_batch(settings, plan, world, number)
            world.barrier("a step")
            seconds, loss = _timed(step, batch, world)
            pauses.after_step(number)
            if number >= WARMUP:
                times.append(seconds)
            losses.append(loss)
    found = _figures(settings, times, losses, flops, world, step.shared_bytes)
    if world.is_main:
        found["setup_s"] = round(setup_s, 1)
        write_whole(Path(settings.run.dir) / "result.json", json.dumps(found))


def random_batch(settings: Settings, plan: Plan, world: World, number: int) -> StepBatch:
    """This rank's part of a global batch of random tokens."""
    job, vocab = settings.job, settings.data.vocab
    count, size = plan.micro_batches(job.train.global_batch)
    first = plan.data_rank(world.rank) * count * size
    generator = torch.Generator().manual_seed(number)
    shape = (job.train.global_batch, job.data.seq_len + 1)
    tokens = torch.randint(0, vocab, shape, generator=generator)[first : first + count * size]
    micro = [
        MicroBatch(
            {"tokens": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}, first + i * size, size
        )
        for i, part in enumerate(tokens.split(size))
    ]
    return StepBatch(number, tuple(micro))


def _timed(step: Step, batch: StepBatch, world: World) -> tuple[float, float]:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    loss = step(batch).loss  # waits for the step
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, loss


def _figures(
    settings: Settings, times: list[float], losses: list[float], flops: float, world: World, shared: int
) -> dict[str, Any]:
    """The slowest rank's median step and the largest memory."""
    mine = torch.tensor(
        [
            statistics.median(times),
            memory_bytes(world.device, shared) / GIB,
            (reserved_bytes(world.device, shared) or 0) / GIB,
        ],
        dtype=torch.float64,
        device=world.device,
    )
    if world.size > 1:
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    seconds, allocated, reserved = mine.tolist()
    job = settings.job
    tokens = job.train.global_batch * job.data.seq_len
    rate = tokens / seconds / world.size
    peak = detect_cluster().device.flops
    return {
        "step_s": round(seconds, 4),
        "steps_s": [round(value, 4) for value in times],
        "tokens_per_s_per_rank": round(rate, 1),
        "mfu": round(rate * flops / peak, 4) if peak else None,
        "allocated_gib": round(allocated, 2),
        "reserved_gib": round(reserved, 2),
        "losses": losses,
    }
