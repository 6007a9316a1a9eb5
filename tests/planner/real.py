"""A tiny job that is run for real on Gloo ranks, with its memory counted by torch's profiler, and simulated."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import shoal.parallel.offload
from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.llama import Llama
from shoal.models.moe import Moe, Routed, Router
from shoal.models.moe_presets import MoeDims
from shoal.models.presets import LlamaDims
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.planner.simulate import Work
from shoal.planner.trace import Trace
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World

DIMS = LlamaDims(
    dim=64, layers=2, heads=4, kv_heads=2, ffn=176, vocab=512, tied=False, rope_theta=1e4, norm_eps=1e-5
)
MOE = MoeDims(
    base=DIMS._replace(ffn=0), experts=4, top_k=2, expert_ffn=96, scoring="softmax", balance_rate=0.001
)
BATCH, LENGTH = 8, 64
MARK = 12_345_677  # bytes of a tensor that says where the second step begins
ATTEMPTS = 24  # what a run holds beside, for a moment, differs from run to run: the least of a few is compared, mostly 2 to 4
LETS_GO_S = 0.003  # for Gloo's threads, which keep the tensors of a work that has ended until they run again


def dense() -> nn.Module:
    return Llama(DIMS)


def deep() -> nn.Module:
    return Llama(DIMS._replace(layers=4))


def balanced_moe() -> nn.Module:
    """A mixture of experts that get equally many tokens, as a simulation assumes."""
    model = Moe(MOE)
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.forward = partial(_in_turn, router)  # pyrefly: ignore[bad-assignment]
    return model


def _in_turn(router: Router, x: Tensor) -> Routed:
    routed = Router.forward(router, x)
    turns = torch.arange(routed.expert.numel(), device=x.device) % len(routed.counts)
    even = torch.full_like(routed.counts, routed.expert.numel() // len(routed.counts))
    return routed._replace(expert=turns.view(routed.expert.shape), counts=even)


def batch(plan: Plan, rank: int, step: int) -> StepBatch:
    """A rank's part of a global batch of random tokens."""
    count, size = plan.micro_batches(BATCH)
    first = plan.data_rank(rank) * count * size
    micro = []
    for number in range(count):
        tokens = torch.randint(0, DIMS.vocab, (size, LENGTH))
        labels = torch.randint(0, DIMS.vocab, (size, LENGTH))
        micro.append(MicroBatch({"tokens": tokens, "labels": labels}, first + number * size, size))
    return StepBatch(step, tuple(micro))


def work(build: Callable[[], nn.Module] = dense) -> Work:
    """The job, to be simulated or run."""
    return Work(build, lambda _: NextToken(), AdamW(lr=1e-3), "bf16", batch)


class Expected(NamedTuple):
    """What a rank is thought to hold at its peak under a plan."""

    plan: Plan
    peaks: dict[int, int]
    """by rank, of those that were simulated; others hold as much as one of them"""
    unseen: int
    """bytes that a real rank may hold beside"""


def real_peaks(world: World, expected: list[Expected], build: Callable[[], nn.Module]) -> list[int]:
    """The most bytes that tensors took at once on this rank in a second step under each plan; collective.

    Tried again, on all ranks alike, while some rank that was simulated holds more than it is thought to.
    """
    _let_go_after_waits()
    shoal.parallel.offload.KEPT_BYTES = 1  # pyrefly: ignore[bad-assignment] - small as these are, they move
    gc.disable()  # as in a run: when cycles are found is chance
    return [_least_peak(world, each, build) for each in expected]


def _let_go_after_waits() -> None:
    """Wait a little more after each collective: on a busy machine the thread that ran it lets go of its tensors later than this
    one comes to the next allocation, and they would count.
    """

    def patient(wait: Any) -> Any:
        def run(*args: Any) -> Any:
            result = wait(*args)
            time.sleep(LETS_GO_S)
            return result

        return run

    torch.distributed.Work.wait = patient(torch.distributed.Work.wait)
    functional.wait_tensor = patient(functional.wait_tensor)


def _least_peak(world: World, expected: Expected, build: Callable[[], nn.Module]) -> int:
    least = sys.maxsize
    for _ in range(ATTEMPTS):
        least = min(least, _real_peak(world, expected.plan, build))
        allowed = expected.peaks.get(world.rank)
        more = torch.tensor(float(allowed is not None and least > allowed + expected.unseen))
        if world.size > 1:
            torch.distributed.all_reduce(more)
        if not more:
            break
    return least


def _real_peak(world: World, plan: Plan, build: Callable[[], nn.Module]) -> int:
    gc.collect()
    job = work(build)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = parallelize(job.build, plan, world, precision=job.precision)
        step = Step(
            model, job.objective(False), job.optimizer, plan, world, precision=job.precision, total_steps=2
        )
        for index in range(2):
            if index == 1:
                torch.empty(MARK, dtype=torch.uint8)
            step(job.batch(plan, world.rank, index))
    return _peak_after_mark(seen)


def _peak_after_mark(seen: Any) -> int:
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    marked = False
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if event.nbytes() == MARK:
            marked = True
        elif marked:
            peak = max(peak, held)
    return peak


def simulated_peak(trace: Trace, device: str = "cpu") -> int:
    """The same, of a trace."""
    held = peak = 0
    for index, event in trace.memory():
        storage = trace.storages[event if event >= 0 else ~event]
        if storage.device == device:
            held += storage.nbytes if event >= 0 else -storage.nbytes
            if trace.moments[index].step >= 1:
                peak = max(peak, held)
    return peak
