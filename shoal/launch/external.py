"""Ranks that somebody else started (torchrun, srun, mpirun, a Kubernetes operator): each gets ready by itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shoal.config import ConfigError, Settings, load
from shoal.launch.ready import device_of, make_ready, with_data
from shoal.launch.worker import StopFlag, run_worker
from shoal.observe.status import RankStatus

if TYPE_CHECKING:
    from shoal.world import World

# large text takes hours; its preparer cannot be told from a stuck one, and is left in peace
PREPARE_S = 24 * 3600.0
TARGET = "shoal.launch.external:train"


def run_job_file(path: str, overrides: list[str]) -> int:
    """Be one rank of a job file's run; the exit code: 0, 1 for a failure, 2 for a job file that cannot be used."""
    try:
        settings = load(path, overrides)
        return run_worker(settings, device=device_of(settings), target=TARGET, patient=False)
    except ValueError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2


def train(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Prepare data on the first rank of each node, choose what is left open alike on all ranks, and train."""
    from shoal.train.loop import train as train_ready

    status.enter("prepare", 0)
    world.agree("job", settings.to_toml())
    problem = ""
    if world.local_rank == 0:
        try:
            with_data(settings)
        except Exception as error:  # told to all ranks, which would wait for this one
            problem = f"data cannot be prepared on rank {world.rank}: {error}"
    world.barrier("data is prepared", problem, deadline_s=PREPARE_S)
    stop.patient = True
    if settings.run.search:
        raise ConfigError(
            "run.search = true is for `shoal train`, which starts the ranks itself; under another launcher run `shoal plan JOB "
            "--search` and give the words that it prints"
        )
    train_ready(make_ready(settings, ranks=world.size), world, status, stop)
