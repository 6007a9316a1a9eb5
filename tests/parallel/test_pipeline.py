"""Stages are balanced and are where their schedule wants them; names and checkpoints do not depend on them."""

from __future__ import annotations

import functools
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.store import load, model_state, save
from shoal.parallel.apply import parallelize
from shoal.parallel.spread import require_layout
from shoal.parallel.stages import split_blocks, stages_of_rank
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import DEEP, build, global_batch, part_of


def cost(ranges: list[range], costs: list[int], begin: int, end: int) -> float:
    sums = [sum(costs[i] for i in part) for part in ranges]
    sums[0] += begin
    sums[-1] += end
    return max(sums)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.integers(0, 20), st.integers(0, 20), st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_other_cut_has_a_cheaper_dearest_stage(
    costs: list[int], begin: int, end: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = split_blocks(costs, begin, end, stages)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in found)
    others = [
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    ]
    assert cost(found, costs, begin, end) == min(cost(other, costs, begin, end) for other in others)


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pipeline stages for 2 blocks; use at most 2"):
        split_blocks([1, 1], 0, 0, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipev"])
def test_every_stage_is_on_one_rank(schedule: str) -> None:
    plan = Plan.model_validate({"pipeline": 4, "schedule": schedule})
    stages = [stage for rank in range(4) for stage in stages_of_rank(plan, rank)]
    assert sorted(stages) == list(range(plan.stages))


def tied_v(world: World) -> str:
    plan = Plan(pipeline=2, micro_batch=2, schedule="zbv")
    try:
        parallelize(functools.partial(build, DEEP), plan, world)
    except ValueError as error:
        return str(error)
    return ""


def test_tied_ends_on_one_rank_are_refused_on_all() -> None:
    for message in run_ranks(2, tied_v):
        assert "'zbv'" in message and "embedding.weight" in message and "not tied" in message


def freeze(prefixes: tuple[str, ...]) -> torch.nn.Module:
    model = build(DEEP._replace(tied=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


FIRST = ("embedding", "blocks.0", "blocks.1")
LAST = ("blocks.2", "blocks.3", "norm", "head")


def train_frozen(world: World, plan: Plan, prefixes: tuple[str, ...]) -> list[float] | str:
    try:
        model = parallelize(functools.partial(freeze, prefixes), plan, world, precision="fp64", seed=7)
    except ValueError as error:
        return str(error)
    step = Step(model, NextToken(), AdamW(lr=1e-2), plan, world, precision="fp64")
    return [step(part_of(global_batch(index), index, plan, world.rank)).loss for index in range(3)]


@pytest.mark.parametrize(("frozen", "rank", "blocks"), [(FIRST, 0, "0, 1"), (LAST, 1, "2, 3")])
@pytest.mark.parametrize("plan", [Plan(pipeline=2, micro_batch=4), Plan(pipeline=2, tensor=2, micro_batch=4)])
def test_a_rank_with_nothing_to_train_is_refused_on_all(
    plan: Plan, frozen: tuple[str, ...], rank: int, blocks: str
) -> None:
    for message in run_ranks(plan.world_size, train_frozen, plan, frozen):
        assert f"leaves rank {rank} of the pipeline blocks {blocks}, of which" in message


def test_a_rank_with_nothing_to_train_is_found_before_ranks_start() -> None:
    with pytest.raises(ValueError, match=r"leaves rank 1 of the pipeline blocks 2, 3,.* plan\.pipeline=1"):
        require_layout(freeze(LAST), Plan(pipeline=2))


def test_a_frozen_stage_of_a_rank_that_trains_another_lets_gradients_through() -> None:
    frozen = ("embedding", "blocks.0", "blocks.3")
    alone = run_ranks(1, train_frozen, Plan(), frozen)[0]
    spread = run_ranks(2, train_frozen, Plan(pipeline=2, micro_batch=2, schedule="interleaved_1f1b"), frozen)
    assert spread[0] == spread[1] == pytest.approx(alone, rel=1e-9) and alone[0] != alone[2]


def state_after(world: World, plan: Plan, folder: Path, steps: int) -> dict[str, Tensor]:
    """Go on from the newest checkpoint, if there is one, and save; returns this rank's names and their whole tensors."""
    model = parallelize(functools.partial(build, DEEP), plan, world, precision="fp64", seed=7)
    step = Step(model, NextToken(), AdamW(lr=1e-2), plan, world, precision="fp64")
    done = 0
    if found := list_checkpoints(folder)[0]:
        load(found[-1], model_state(model) | step.state(), world)
        done = found[-1].step
    for index in range(done, done + steps):
        step(part_of(global_batch(index), index, plan, world.rank))
    state = model_state(model) | step.state()
    save(folder, done + steps, state, {}, world, keep=3)
    return state


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pipeline=2, micro_batch=4),
        Plan(tensor=2, shard=2, micro_batch=4),
        Plan(context=2),
        Plan(pipeline=2, tensor=2, micro_batch=2, schedule="interleaved_1f1b"),
    ],
    ids=lambda plan: plan.describe(),
)
def test_a_checkpoint_of_any_axes_is_read_by_one_process_and_back(plan: Plan, tmp_path: Path) -> None:
    run_ranks(plan.world_size, save_only, plan, tmp_path / "a", 2)
    names = set(list_checkpoints(tmp_path / "a")[0][-1].manifest["tensors"])
    whole = run_ranks(1, state_after, Plan(), tmp_path / "a", 0)[0]
    assert names == set(whole)
    run_ranks(plan.world_size, save_only, plan, tmp_path / "a", 0)  # read back, and written again
    again = run_ranks(1, state_after, Plan(), tmp_path / "a", 0)[0]
    assert all(torch.equal(again[name], whole[name]) for name in names)
    right = run_ranks(1, state_after, Plan(), tmp_path / "b", 2)[0]
    for name in names:
        torch.testing.assert_close(whole[name], right[name], rtol=1e-9, atol=1e-11, msg=name)


def save_only(world: World, plan: Plan, folder: Path, steps: int) -> None:
    state_after(world, plan, folder, steps)
