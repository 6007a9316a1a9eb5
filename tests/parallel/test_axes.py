"""Tensor, sequence, context and pipeline parallelism compute what one process does, alone and together."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.presets import LlamaDims
from shoal.parallel.apply import parallelize
from shoal.parallel.pipeline import MULTIPLE, SINGLE
from shoal.plan import Plan
from shoal.train.evaluate import Evaluation, evaluate
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import Outcome, run_all, run_ranks
from tests.train.toy import (
    BATCH,
    DEEP,
    OPTIMIZER,
    Record,
    build,
    global_batch,
    part_of,
    run_by_hand,
    run_plan,
    whole_weights,
)

STEPS = 3
UNTIED = DEEP._replace(tied=False)
ALONE: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 4, "micro_batch": 8},  # two ranks share a key/value head
    {"context": 2},
    {"context": 2, "context_by": "all_to_all", "micro_batch": 4},
    {"pipeline": 2, "micro_batch": 4},
    {"pipeline": 4, "micro_batch": 2},
    {"pipeline": 2, "micro_batch": 2, "schedule": "gpipe"},
    {"pipeline": 2, "micro_batch": 2, "schedule": "interleaved_1f1b"},
    {"pipeline": 2, "micro_batch": 2, "schedule": "looped_bfs"},
    {"pipeline": 2, "micro_batch": 2, "schedule": "interleaved_zero_bubble"},
]
TOGETHER: list[dict[str, Any]] = [
    {"tensor": 2, "shard": 2},
    {"tensor": 2, "shard": 2, "zero": 1, "micro_batch": 4},
    {"tensor": 2, "replicate": 2, "recompute": "full"},
    {"context": 2, "shard": 2, "zero": 2, "micro_batch": 4},
    {"context": 2, "tensor": 2},
    {"context": 2, "replicate": 2},
    {"pipeline": 2, "shard": 2, "micro_batch": 2},
    {"pipeline": 2, "shard": 2, "zero": 3, "micro_batch": 2},
    {"pipeline": 2, "replicate": 2, "micro_batch": 2},
    {"pipeline": 2, "replicate": 2, "micro_batch": 2, "shares": (3, 1)},
    {"context": 2, "shard": 2, "zero": 3, "micro_batch": 2, "shares": (1, 3)},
    {"pipeline": 2, "tensor": 2, "micro_batch": 2},
    {"pipeline": 2, "context": 2, "micro_batch": 2, "recompute": "full"},
]
ENDS_APART: list[dict[str, Any]] = [  # V-shaped schedules have both ends on one rank
    {"pipeline": 2, "micro_batch": 2, "schedule": "zbv"},
    {"pipeline": 2, "micro_batch": 2, "schedule": "dualpipev", "recompute": "full"},
    {"pipeline": 2, "shard": 2, "micro_batch": 2, "schedule": "zbv"},
    {"pipeline": 2, "tensor": 2, "micro_batch": 2, "schedule": "interleaved_zero_bubble"},
]
MICRO_BATCHES: list[dict[str, Any]] = [
    {"pipeline": 2, "micro_batch": micro_batch, "schedule": schedule}
    for micro_batch in (4, 8)
    for schedule in ("gpipe", "1f1b")
]


def named(plan: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.items())


@functools.cache
def by_hand(dims: LlamaDims) -> Record:
    return run_by_hand(torch.float64, OPTIMIZER, STEPS, dims)


def check(records: list[Record], right: Record) -> None:
    """Losses, norms and weights of all ranks, to fp64's rounding; AdamW makes 1e-13 of 1e-16 where a gradient is nearly zero."""
    weights: dict[str, Tensor] = {}
    for record in records:
        assert record.initial_hash == right.initial_hash
        assert record.losses == pytest.approx(right.losses, rel=1e-12)
        assert record.norms == pytest.approx(right.norms, rel=1e-12)
        weights |= record.weights
    assert weights.keys() == right.weights.keys()
    for name, weight in right.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-11, msg=name)


@functools.cache
def trained(ranks: int) -> dict[str, Outcome]:
    """All plans for so many ranks, by name."""
    models = [(keys, DEEP) for keys in ALONE + TOGETHER + MICRO_BATCHES] + [
        (keys, UNTIED) for keys in ENDS_APART
    ]
    plans = [(keys, Plan.model_validate(keys), dims) for keys, dims in models]
    wanted = {
        named(keys): (plan, "fp64", OPTIMIZER, STEPS, dims)
        for keys, plan, dims in plans
        if plan.world_size == ranks
    }
    return run_all(ranks, run_plan, wanted)


def found(keys: dict[str, Any]) -> list[Record]:
    return trained(Plan.model_validate(keys).world_size)[named(keys)].get()


@pytest.mark.parametrize("keys", ALONE + TOGETHER, ids=named)
def test_every_axis_trains_as_one_process_does(keys: dict[str, Any]) -> None:
    check(found(keys), by_hand(DEEP))


@pytest.mark.parametrize("keys", ENDS_APART, ids=named)
def test_so_does_every_axis_of_a_model_without_tied_ends(keys: dict[str, Any]) -> None:
    check(found(keys), by_hand(UNTIED))


def test_eight_ranks_on_three_axes() -> None:
    plan = Plan(pipeline=2, tensor=2, shard=2, micro_batch=2)
    check(run_ranks(8, run_plan, plan, "fp64", OPTIMIZER, STEPS, DEEP), by_hand(DEEP))


@pytest.mark.parametrize("keys", MICRO_BATCHES, ids=named)
def test_a_pipelines_gradients_do_not_depend_on_its_micro_batches(keys: dict[str, Any]) -> None:
    check(found(keys), by_hand(DEEP))


def packed(step: int) -> dict[str, Tensor]:
    """A global batch whose samples hold several documents each."""
    batch = global_batch(step)
    length = batch["tokens"].shape[1]
    begins = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(step)) < 0.3
    begins[:, 0] = False
    column = torch.arange(length).expand_as(begins)
    starts = torch.where(begins, column, 0).cummax(1).values
    return {**batch, "documents": begins.cumsum(1), "positions": column - starts}


def run_packed(world: World, plan: Plan) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = parallelize(functools.partial(build, DEEP), plan, world, precision="fp64", seed=7)
    step = Step(model, NextToken(), AdamW(lr=1e-2), plan, world, precision="fp64")
    results = [step(part_of(packed(index), index, plan, world.rank)) for index in range(3)]
    return [result.loss for result in results], [result.grad_norm for result in results], whole_weights(model)


PACKED: list[dict[str, Any]] = [
    {"context": 2},
    {"context": 2, "context_by": "all_to_all"},
    {"tensor": 2},
    {"pipeline": 2, "micro_batch": 4},
    {"context": 2, "tensor": 2},
]


@functools.cache
def packed_on(ranks: int) -> dict[str, Outcome]:
    return run_all(ranks, run_packed, of_size(ranks, [{}, *PACKED]))


def of_size(ranks: int, plans: list[dict[str, Any]]) -> dict[str, tuple[Plan]]:
    """Plans for so many ranks, by name, as the argument of a function."""
    all_plans = {named(keys): Plan.model_validate(keys) for keys in plans}
    return {name: (plan,) for name, plan in all_plans.items() if plan.world_size == ranks}


@pytest.mark.parametrize("keys", PACKED, ids=named)
def test_packed_documents_stay_apart(keys: dict[str, Any]) -> None:
    plan = Plan.model_validate(keys)
    losses, norms, weights = packed_on(1)[""].get()[0]
    for found in packed_on(plan.world_size)[named(keys)].get():
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-12)
        for name, weight in found[2].items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-11, msg=name)


def run_eval(world: World, plan: Plan) -> Evaluation:
    model = parallelize(functools.partial(build, UNTIED), plan, world, precision="fp64", seed=7)
    held_out = [part_of(global_batch(index), index, plan, world.rank) for index in range(2)]
    last = held_out[-1].micro_batches
    filler = MicroBatch(last[-1].data, last[-1].first, 0)
    held_out[-1] = StepBatch(1, (*last[:-1], filler))
    return evaluate(model, NextToken(), held_out, world)


EVALUATED: list[dict[str, Any]] = [
    {**keys, "micro_batch": BATCH // 4}
    for keys in (
        {"tensor": 2},
        {"context": 2},
        {"pipeline": 2, "tensor": 2},
        *({"pipeline": 2, "schedule": schedule} for schedule in (*SINGLE, *MULTIPLE)),
    )
]


@functools.cache
def evaluated(ranks: int) -> dict[str, Outcome]:
    return run_all(ranks, run_eval, of_size(ranks, [{"micro_batch": BATCH // 4}, *EVALUATED]))


@pytest.mark.parametrize("keys", EVALUATED, ids=named)
def test_an_evaluation_counts_each_sample_once(keys: dict[str, Any]) -> None:
    (alone,) = evaluated(1).values()
    right = alone.get()[0]
    for found in evaluated(Plan.model_validate(keys).world_size)[named(keys)].get():
        assert found.weight == right.weight and found.loss == pytest.approx(right.loss, rel=1e-12)
