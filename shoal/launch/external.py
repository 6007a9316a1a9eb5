"""Ranks that somebody else started (torchrun, srun, mpirun, a Kubernetes operator): each gets ready by itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shoal.config import ConfigError, Settings, load
from shoal.launch.ready import make_ready, with_data
from shoal.launch.worker import StopFlag, run_worker
from shoal.observe.status import RankStatus

if TYPE_CHECKING:
    from shoal.world import World

TARGET = "shoal.launch.external:train"


def run_job_file(path: str, overrides: list[str]) -> int:
    """Be one rank of a job file's run; the exit code: 0, 1 for a failure, 2 for a job file that cannot be used."""
    try:
        settings = load(path, overrides)
    except ConfigError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    return run_worker(settings, target=TARGET)


def train(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Prepare data on the first rank of each node, choose what is left open alike on all ranks, and train."""
    from shoal.train.loop import train as train_ready

    status.enter("prepare", 0)
    world.agree("the job", settings.to_toml())
    problem = ""
    if world.local_rank == 0:
        try:
            with_data(settings)
        except ValueError as error:
            problem = str(error)
    if problem := world.broadcast_text(problem if world.is_main else None) or problem:
        raise ConfigError(problem)
    world.barrier("data is prepared")
    train_ready(make_ready(settings, ranks=world.size), world, status, stop)
