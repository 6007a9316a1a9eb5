"""`run_ranks` brings back values, errors with their rank, and names ranks that hang or die."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shoal.world import World
from tests.ranks import run_all, run_ranks


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


def _fail_at(world: World, number: int, bad: int) -> tuple[int, float]:
    if number == bad and world.rank == 1:
        raise KeyError(f"not {number}")
    world.barrier("all are here")
    return world.rank * number, torch.rand(()).item()


def test_a_case_that_fails_has_its_error_and_the_others_their_values() -> None:
    found = run_all(2, _fail_at, {number: (number, 2) for number in (1, 2, 3)})
    (_, drawn), (own, _) = found[1].get()
    assert own == 1
    assert found[3].get() == [(0, drawn), (3, drawn)]  # on fresh ranks, with the same random numbers
    with pytest.raises(KeyError, match="not 2"):
        found[2].get()


def _leave_behind(world: World, number: int) -> int:
    if number == 1:
        torch.set_grad_enabled(False)
    return number


def test_a_case_that_leaves_another_state_behind_is_told() -> None:
    found = run_all(1, _leave_behind, {number: (number,) for number in (0, 1, 2)})
    assert found[0].get() == [0] and found[2].get() == [2]
    with pytest.raises(AssertionError, match="left another state behind"):
        found[1].get()
