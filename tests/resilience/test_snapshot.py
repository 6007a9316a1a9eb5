"""State in a launcher's memory: whole at any moment, the same on all ranks, and gone with the last process that has it."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from shoal.plan import Plan
from shoal.resilience import snapshot
from shoal.resilience.snapshot import (
    EMPTY,
    KEPT,
    Kept,
    Snapshots,
    held,
    is_something_kept,
    kept_for,
    lost_with_one,
    open_snapshots,
)
from shoal.world import World, join_world
from shoal.world.meeting import Meeting
from tests.ranks import run_ranks


def state(number: float) -> dict[str, Tensor]:
    number = float(number)  # else tensors are of whole numbers
    return {
        "model.weight": torch.full((3, 5), number),
        "model.turned": torch.arange(6.0).view(2, 3).t() * number,  # not contiguous
        "optimizer.step": torch.tensor(number),
        "buffer.load": torch.tensor([int(number)] * 7, dtype=torch.int64),
        "model.half": torch.full((9,), number, dtype=torch.bfloat16),
        "model.none": torch.empty(0),
    }


@pytest.fixture
def alone() -> Generator[World]:
    with join_world(device="cpu") as world:
        yield world


def given_back(snapshots: Snapshots, done: int, alone: World) -> dict[str, Tensor]:
    found = state(0.0)
    assert snapshots.newest(alone) == done
    snapshots.give_back(found, alone)
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.equal(other[name]), name


def test_the_last_two_states_are_there_bit_for_bit_also_for_another_process_of_the_rank(alone: World) -> None:
    with held(1) as (path,):
        first = Snapshots(path, state(0.0), "plan")
        for done in (1, 2, 3):
            first.take(done, state(done), alone)
        again = Snapshots(path, state(0.0), "plan")
        assert sorted(again.steps) == [2, 3]
        assert_equal(given_back(again, 3, alone), state(3))
        assert again.steps == [3, 3]  # taken again at once, as what this run goes on from
        again.forget(alone)  # the run goes on from elsewhere
        again.take(1, state(9), alone)
        assert_equal(given_back(again, 1, alone), state(9))


def test_a_state_that_is_half_written_is_not_there_and_the_one_before_is(
    monkeypatch: pytest.MonkeyPatch, alone: World
) -> None:
    with held(1) as (path,):
        snapshots = Snapshots(path, state(0.0), "plan")
        snapshots.take(1, state(1), alone)
        snapshots.take(2, state(2), alone)
        parts, real = iter(range(3)), snapshot._part

        def part_or_death(slot: Tensor, *rest: Any) -> Tensor:
            if next(parts, None) is None:
                raise KeyboardInterrupt
            return real(slot, *rest)

        monkeypatch.setattr(snapshot, "_part", part_or_death)
        with pytest.raises(KeyboardInterrupt):
            snapshots.take(3, state(3), alone)
        monkeypatch.undo()
        again = Snapshots(path, state(0.0), "plan")
        assert sorted(again.steps) == [EMPTY, 2]
        assert_equal(given_back(again, 2, alone), state(2))


def test_states_of_another_plan_or_of_other_shapes_are_not_taken_up(alone: World) -> None:
    with held(1) as (path,):
        Snapshots(path, state(0.0), "plan").take(1, state(1), alone)
        assert Snapshots(path, state(0.0), "plan").steps.count(1) == 1
        assert Snapshots(path, state(0.0), "another plan").steps == [EMPTY] * 2
        Snapshots(path, state(0.0), "plan").take(1, state(1), alone)
        assert Snapshots(path, {"model.weight": torch.zeros(2)}, "plan").steps == [EMPTY] * 2


def test_nothing_is_left_of_it(alone: World) -> None:
    with held(2) as paths:
        Snapshots(paths[1], state(0.0), "plan").take(1, state(1), alone)
        assert all(Path(path).exists() for path in paths)
    assert not any(Path(path).exists() for path in paths)


def newest_of_all(world: World, paths: list[str], taken: list[list[int]]) -> int | None:
    snapshots = Snapshots(paths[world.rank], state(0.0), f"part {world.rank}")
    for done in taken[world.rank]:
        snapshots.take(done, state(done), world)
    return snapshots.newest(world)


@pytest.mark.parametrize(
    ("taken", "newest"),
    [([[1, 2], [1, 2]], 2), ([[1, 2, 3], [1, 2]], 2), ([[1], []], None), ([[1, 2], [3, 4]], None)],
)
def test_ranks_go_on_from_the_newest_state_that_all_of_them_have(
    taken: list[list[int]], newest: int | None
) -> None:
    with held(2) as paths:
        assert run_ranks(2, newest_of_all, paths, taken) == [newest] * 2


def again_from_others(world: World, paths: list[str], has: list[list[int]]) -> tuple[int | None, float]:
    """A state that some of two replicas have, in memories that are another's."""
    for path, steps in zip(paths, has, strict=True) if world.is_main else ():
        for done in steps:
            Snapshots(path, state(0.0), "part 0").take(done, state(done), world)
    world.barrier("taken")
    mine = world.rank + 1  # of three memories: rank 0 sees the first and its own, rank 1 only its own
    others = paths[:1] if world.is_main else []
    snapshots = Snapshots(paths[mine], state(0.0), "part 0", others)
    newest, found = snapshots.newest(world), state(0.0)
    if newest is not None:
        snapshots.give_back(found, world)
        assert_equal(found, state(newest))
        snapshots.take(newest + 1, state(newest + 1), world)
        assert newest + 1 in snapshots.steps
    return newest, float(found["optimizer.step"])


@pytest.mark.parametrize(
    ("has", "newest"),
    [
        ([[4, 5], [], []], 5),  # both from another memory, of which one is elsewhere
        ([[], [], [6, 7]], 7),  # of rank 1 alone
        ([[1], [2, 3], []], 3),
        ([[], [], []], None),
    ],
)
def test_a_replica_that_has_no_state_gets_that_of_another(has: list[list[int]], newest: int | None) -> None:
    with held(3) as paths:
        expected = (newest, float(newest or 0))
        assert run_ranks(2, again_from_others, paths, has) == [expected] * 2


def with_guests(
    world: World, paths: list[str], guests: list[str], lost: int | None
) -> tuple[int | None, float]:
    """Machines of one rank each, whose memory one may lose: 3 states are taken, and the newest is had again."""
    number = world.rank + 1.0
    mine = Snapshots(
        paths[world.rank],
        state(0.0),
        f"part {world.rank}",
        [guests[world.rank]],
        guest=guests[world.rank],
        machine=world.rank,
    )
    for done in (1, 2, 3):
        mine.take(done, state(10 * done + number), world)
    path, guest = (paths[-1], guests[-1]) if world.rank == lost else (paths[world.rank], guests[world.rank])
    again = Snapshots(path, state(0.0), f"part {world.rank}", [guest], guest=guest, machine=world.rank)
    newest, found = again.newest(world), state(0.0)
    if newest is not None:
        again.give_back(found, world)
        again.take(newest + 1, found, world)
    return newest, float(found["optimizer.step"])


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_what_a_lost_machine_alone_had_is_had_from_the_next_one(lost: int | None) -> None:
    with held(4) as paths, held(4) as guests:  # the last ones are of a machine in place of the lost one
        assert run_ranks(3, with_guests, paths, guests, lost) == [(3, 30.0 + rank) for rank in (1, 2, 3)]


@pytest.mark.parametrize(
    ("plan", "firsts", "is_lost"),
    [
        (Plan(shard=4), [0, 2], True),
        (Plan(replicate=4), [0, 2], False),
        (Plan(replicate=2, shard=2), [0, 2], False),
        (Plan(pipeline=2, replicate=2), [0, 2], True),
        (Plan(pipeline=2, replicate=2), [0], False),  # one machine
        (Plan(shard=3), [0, 2], False),  # as many ranks as they are, there is no next one for each
    ],
)
def test_copies_are_made_where_a_machine_alone_has_a_part(
    plan: Plan, firsts: list[int], is_lost: bool
) -> None:
    assert lost_with_one(plan, firsts) is is_lost


def two_lineages(world: World, paths: list[str]) -> tuple[int | None, float]:
    """Rank 1 was away while rank 0 went back and on: what rank 1 has is further, and given up."""
    mine, found = Snapshots(paths[world.rank], state(0.0), "part 0"), state(0.0)
    mine.take(30, state(30), world)
    if world.is_main:
        alone = World(
            0, 1, 0, 1, world.device, world.backend, world.deadline, Meeting(HashStore(), 0, 1, 9.0)
        )
        mine.forget(alone)
        mine.take(25, state(25), alone)
    newest = mine.newest(world)
    mine.give_back(found, world)
    return newest, float(found["optimizer.step"])


def test_what_was_given_up_is_not_taken_up_again_however_far_it_was() -> None:
    with held(2) as paths:
        assert run_ranks(2, two_lineages, paths) == [(25, 25.0)] * 2


def test_what_is_told_apart_is_how_state_is_cut_and_not_how_often_it_is_there() -> None:
    plan = Plan(replicate=2, shard=2)
    assert kept_for(plan, 0) == kept_for(plan, 2) == kept_for(Plan(shard=2), 0) != kept_for(plan, 1)
    assert kept_for(Plan(shard=2, zero=1), 0) != kept_for(Plan(shard=2, zero=3), 0)


def test_a_rank_of_another_launcher_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEPT, raising=False)
    assert open_snapshots(0, lambda: pytest.fail("state is made"), "plan") is None
    with pytest.raises(ValueError, match=r"memory_every = 5 needs the launcher of `shoal train`"):
        open_snapshots(5, lambda: state(0.0), "plan")


def test_whether_anything_is_kept_is_seen_in_the_memory_of_all_ranks_here(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEPT, raising=False)
    assert not is_something_kept()
    with held(2) as paths:
        monkeypatch.setenv(KEPT, json.dumps(Kept(paths[0], paths)))
        assert not is_something_kept()
        state = {"a": torch.arange(3.0)}
        Snapshots(paths[1], state, "any").take(1, state, alone)
        assert is_something_kept()
