"""`run_ranks` brings back values, errors with their rank, and names ranks that hang or die."""

from __future__ import annotations

import os
import signal
import time

import pytest

from shoal.world import World
from tests.ranks import run_ranks


def _fail(world: World) -> None:
    if world.rank == 1:
        raise KeyError("rank 1 only")
    world.barrier("never")


def test_the_exception_of_a_rank_is_raised_with_its_rank() -> None:
    with pytest.raises(KeyError, match="rank 1 only") as caught:
        run_ranks(2, _fail)
    assert "on rank 1 of 2" in caught.value.__notes__[0]


def _hang(world: World) -> None:
    if world.rank == 1:
        time.sleep(100)


def test_a_hung_rank_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_ranks(2, _hang, timeout=1)


def _die(world: World) -> None:
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 died: killed by SIGKILL"):
        run_ranks(2, _die)
