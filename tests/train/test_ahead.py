"""What the next step needs first is gathered while the rest is updated: numbers stay, and who writes weights is seen."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.job import Precision
from shoal.parallel.apply import parallelize
from shoal.parallel.direct import gathered_first
from shoal.parallel.replicate import core
from shoal.parallel.shard import parameter_groups, reshard
from shoal.parallel.spread import spread_of
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import (
    BATCH,
    LENGTH,
    OPTIMIZER,
    Record,
    build,
    global_batch,
    part_of,
    run_plan,
    whole_weights,
)


def both(world: World, plan: Plan, precision: Precision) -> tuple[Record, Record]:
    return run_plan(world, plan, precision), run_plan(world, plan, precision, ahead=True)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (Plan(shard=2, zero=2, micro_batch=4), "bf16"),
        (Plan(shard=2, zero=3, micro_batch=8), "fp32"),
        (Plan(shard=2, zero=1, micro_batch=8), "fp64"),
    ],
)
def test_bits_are_those_of_gathers_when_they_are_needed(plan: Plan, precision: Precision) -> None:
    for late, ahead in run_ranks(2, both, plan, precision):
        assert ahead.losses == late.losses
        assert ahead.norms == late.norms
        assert all(torch.equal(ahead.weights[name], weight) for name, weight in late.weights.items())


def stepped(world: World, plan: Plan) -> tuple[nn.Module, Step]:
    model = parallelize(build, plan, world, precision="bf16", seed=7)
    step = Step(
        model,
        NextToken(),
        OPTIMIZER,
        plan,
        world,
        precision="bf16",
        total_steps=9,
        usual_weight=BATCH * LENGTH / 2,
    )
    step(part_of(global_batch(0), 0, plan, world.rank), ahead=True)
    return model, step


def is_under_way(model: nn.Module) -> bool:
    return any(group._all_gather_result is not None for group in parameter_groups(model))  # pyrefly: ignore


def written_between(world: World) -> tuple[list[bool], float, float]:
    """Weights are written after a step that gathered ahead, as when an older checkpoint is loaded."""
    plan = Plan(shard=2, zero=2, micro_batch=8)
    losses = []
    for ahead in (True, False):
        model, step = stepped(world, plan)
        flags = [is_under_way(model)]
        if not ahead:
            reshard(model)
        with torch.no_grad():
            reshard(model)  # as everything does that takes a model's state
            flags.append(is_under_way(model))
            for parameter in core(model).parameters():
                parameter.mul_(0.5)
        losses.append(step(part_of(global_batch(1), 1, plan, world.rank)).loss)
    return flags, losses[0], losses[1]


def test_weights_that_are_written_meanwhile_are_gathered_again() -> None:
    for flags, ahead, late in run_ranks(2, written_between):
        assert flags == [True, False]
        assert ahead == late


def evaluated_between(world: World) -> tuple[float, float]:
    plan = Plan(shard=2, zero=2, micro_batch=8)
    model, _ = stepped(world, plan)
    data = global_batch(1)
    with torch.no_grad():
        first = NextToken().loss(model(data["tokens"]), data).sum.item()
    reshard(model)
    with torch.no_grad():
        return first, NextToken().loss(model(data["tokens"]), data).sum.item()


def test_an_evaluation_has_the_weights_after_the_step() -> None:
    for first, again in run_ranks(2, evaluated_between):
        assert first == again


def firsts(world: World) -> tuple[set[str], bool]:
    model, step = stepped(world, Plan(shard=2, zero=3, micro_batch=8))
    names = {parameter: name for name, parameter in core(model).named_parameters()}
    early = [names[p] for p in gathered_first(model)]
    weights = whole_weights(model)
    return set(early), set(step.optimizer.state()) >= {f"optimizer.{n}.exp_avg"[10:] for n in weights}


def test_what_is_gathered_first_is_what_no_block_has() -> None:
    for early, has_all_states in run_ranks(2, firsts):
        assert early == {"embedding.weight", "norm.weight"}
        assert has_all_states


def norms(world: World, precision: Precision) -> tuple[list[float], list[float]]:
    from unittest.mock import patch

    from shoal.parallel.exchange import Exchange

    plan = Plan(shard=2, zero=2, micro_batch=8)
    run = partial(run_plan, world, plan, precision, steps=2)
    on_the_way = run()
    with patch.object(Exchange, "take_squares", lambda self: None):
        after = run()
    return on_the_way.norms, after.norms


def test_squares_that_are_found_on_the_way_are_those_of_all_gradients() -> None:
    """In fp32, of gradients that were summed in fp32: another order of additions."""
    for on_the_way, after in run_ranks(2, norms, "bf16"):
        assert on_the_way[0] == pytest.approx(after[0], rel=1e-6)
        assert on_the_way[1] == pytest.approx(after[1], rel=1e-2)  # of bf16 weights that differ by roundings


def counted(world: World, plan: Plan) -> tuple[list[bool], int]:
    """Which exchanges gave their squares in the last of three steps, and how many numbers they hold on to."""
    model = parallelize(build, plan, world, precision="bf16", seed=7)
    step = Step(model, NextToken(), OPTIMIZER, plan, world, precision="bf16", total_steps=9)
    for number in range(3):
        found = step.forward_backward(part_of(global_batch(0), number, plan, world.rank).micro_batches)
    held = sum(len(exchange._squares) for exchange in spread_of(model).exchanges)
    return [squares is not None for squares in found.squares], held


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(shard=2, zero=2, micro_batch=8), [True] * 3),
        (Plan(shard=2, zero=2, micro_batch=4), [False] * 3),  # gradients of micro-batches are added up later
        (Plan(shard=2, zero=1, micro_batch=4), [False] * 3),  # these were added up in fp32 before
    ],
)
def test_squares_are_known_where_one_exchange_has_all(plan: Plan, expected: list[bool]) -> None:
    assert run_ranks(2, counted, plan) == [(expected, 0)] * 2


def test_squares_of_gradients_that_copies_sum_further_are_not_taken() -> None:
    plan = Plan(replicate=2, shard=2, zero=2, micro_batch=4)
    assert run_ranks(4, counted, plan) == [([], 0)] * 4


def hooked(world: World) -> float:
    """Gradients that hooks set to zero when they have been received."""
    plan = Plan(shard=2, zero=2, micro_batch=8)
    model = parallelize(build, plan, world, precision="bf16", seed=7)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(zero_gradient)
    step = Step(model, NextToken(), OPTIMIZER, plan, world, precision="bf16", total_steps=9)
    return step(part_of(global_batch(0), 0, plan, world.rank)).grad_norm


def zero_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def test_the_norm_is_of_gradients_as_hooks_leave_them() -> None:
    assert run_ranks(2, hooked) == [0.0, 0.0]


class Whole(nn.Module):
    """A model without blocks: all of it is gathered first. Its last layer has fewer rows than there are ranks, if asked for."""

    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.inner, self.out = nn.Linear(32, 64), nn.Linear(64, rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.inner(self.embedding(tokens))))


def first_of(world: World, plan: Plan, precision: Precision, rows: int) -> int:
    model = parallelize(partial(Whole, rows), plan, world, precision=precision, seed=7)
    step = Step(model, NextToken(), OPTIMIZER, plan, world, precision=precision, total_steps=9)
    return len(step._first)


@pytest.mark.parametrize(
    ("plan", "precision", "rows", "expected"),
    [
        (Plan(shard=4, zero=2), "bf16", 64, 5),
        (Plan(shard=4, zero=2), "bf16", 2, 0),  # fully_shard gathers it
        (Plan(shard=4, zero=2), "float8_gather", 64, 0),  # scales are found in the forward
        (Plan(replicate=2, shard=2, zero=2), "bf16", 64, 0),
        (Plan(shard=4, zero=2, offload=("parameters",)), "bf16", 64, 0),
    ],
)
def test_what_cannot_be_asked_for_ahead_is_not(
    plan: Plan, precision: Precision, rows: int, expected: int
) -> None:
    if precision == "float8_gather":
        pytest.importorskip("torchao")
    assert run_ranks(4, first_of, plan, precision, rows) == [expected] * 4
