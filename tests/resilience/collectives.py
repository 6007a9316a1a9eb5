"""What ranks run in the tests of verdicts: steps of a few collectives in two groups, of which one rank does something else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.config import Settings
from shoal.launch.worker import StopFlag
from shoal.observe.status import RankStatus
from shoal.world import World

WRONG_RANK, WRONG_STEP = 1, 6
WRONG_AT = "wrong-at"
"""the file that says when"""
PAUSE_S = 0.02


def steps(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """`train.steps` steps; the model's option `fault` says what rank 1 does in one of them."""
    assert settings.plan is not None
    group = world.mesh(settings.plan).get_group("shard")
    fault = settings.model.options.get("fault", "")
    for step in range(settings.train.steps):
        wrong = fault if (world.rank, step) == (WRONG_RANK, WRONG_STEP) else ""
        status.enter("data", step)
        time.sleep(settings.model.options.get("pause", PAUSE_S))
        if fault == "slow data" and world.rank == WRONG_RANK:
            time.sleep(0.1)
        status.enter("forward", step)
        if fault == "slow" and world.rank == WRONG_RANK:
            time.sleep(0.1)
        if wrong:
            Path(settings.run.dir, WRONG_AT).write_text(str(time.time()))
        work(group, wrong)
        status.enter("reduce", step)
        dist.all_reduce(torch.ones(4))
        status.enter("update", step)
    status.enter("end", settings.train.steps)


def work(group: dist.ProcessGroup, wrong: str) -> None:
    """An all-gather and two all-reduces, unless something is wrong."""
    if wrong == "hang":
        while True:
            time.sleep(1000)
    if wrong in ("stop", "pause"):
        if wrong == "pause":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    part, whole = torch.ones(3), torch.ones(3 * group.size())
    if wrong != "skip":
        dist.all_gather(list(whole.chunk(group.size())), part, group=group)
    calls = [(CALLS.get(wrong, plain), torch.ones(8)), (plain, torch.ones(2))]
    for call, x in reversed(calls) if wrong == "order" else calls:
        call(x, group)


def plain(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def largest(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)


def integers(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x.int(), group=group)


def shorter(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x[:5].clone(), group=group)


def broadcast(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(x, src=dist.get_global_rank(group, 0), group=group)


def twice(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)
    dist.all_reduce(x.clone().double(), group=group)


CALLS = {"reduction": largest, "type": integers, "shape": shorter, "operation": broadcast, "extra": twice}
