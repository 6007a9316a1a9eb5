"""Any module of a user's trains under replicate and shard as it does alone, however awkward."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.llama import Llama
from shoal.parallel.apply import parallelize, synchronise_buffers
from shoal.parallel.initialise import tied_names, weights_hash
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.train.objective import Supervised
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.parallel.models import Awkward, batch, loss
from tests.ranks import run_ranks
from tests.train.toy import DIMS, build

PLANS = [
    Plan(replicate=2),
    Plan(shard=2, zero=1),
    Plan(shard=2, zero=2),
    Plan(shard=2, zero=3),
    Plan(shard=4, zero=3),
    Plan(replicate=2, shard=2, zero=2),
]
IDS = [plan.describe() for plan in PLANS]


class Seen(NamedTuple):
    first_hash: str
    numbers: list[tuple[float, float]]
    weights: dict[str, Tensor]
    ties: list[list[str]]
    buffers: dict[str, Tensor]


def train(world: World, plan: Plan, given: bool = False, steps: int = 4) -> Seen:
    """Train Awkward; `given`: hand over a module that every rank made with other random numbers."""
    if given:
        torch.manual_seed(world.rank)
    model = parallelize(Awkward() if given else Awkward, plan, world, precision="fp64", seed=5)
    first = weights_hash(model)
    step = Step(model, Supervised(loss), AdamW(lr=1e-2), plan, world, precision="fp64", total_steps=steps)
    numbers = []
    for index in range(steps):
        x, y = batch(index)
        local = len(x) // plan.data_degree
        at = plan.data_rank(world.rank) * local
        result = step(StepBatch(index, (MicroBatch((x[at : at + local], y[at : at + local]), at, local),)))
        numbers.append((result.loss, result.grad_norm))
    synchronise_buffers(model, world)
    inner = core(model)
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in inner.named_parameters()
    }
    return Seen(first, numbers, weights, tied_names(inner), {n: b.clone() for n, b in inner.named_buffers()})


@pytest.fixture(scope="module")
def alone() -> Seen:
    return run_ranks(1, train, Plan())[0]


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_an_awkward_module_trains_as_on_one_device(plan: Plan, alone: Seen) -> None:
    for seen in run_ranks(plan.world_size, train, plan):
        assert seen.first_hash == alone.first_hash
        for ours, theirs in zip(seen.numbers, alone.numbers, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(seen.weights[name], weight, rtol=0, atol=1e-10, msg=name)
        assert seen.ties == alone.ties
        for name, buffer in alone.buffers.items():
            torch.testing.assert_close(seen.buffers[name], buffer, msg=name)


def test_what_is_frozen_or_integer_stays_and_what_is_unused_only_decays(alone: Seen) -> None:
    with torch.random.fork_rng():
        fresh = run_ranks(1, train, Plan(), False, 0)[0]
    for name in ("frozen", "order"):
        assert torch.equal(alone.weights[name], fresh.weights[name])
    # AdamW: w <- w (1 - lr decay) a step, and its gradient is zero
    expected = fresh.weights["unused.weight"] * (1 - 1e-2 * 0.1) ** 4
    torch.testing.assert_close(alone.weights["unused.weight"], expected, rtol=1e-12, atol=0)


def test_the_module_keeps_its_own_initialisation(alone: Seen) -> None:
    fresh = run_ranks(1, train, Plan(), False, 0)[0]
    assert (
        fresh.weights["layers.0.down.weight"].std() > 0.15
    )  # trunc_normal_(std=0.3), not Linear's 0.18 uniform
    assert torch.equal(fresh.weights["frozen"], torch.full((5,), 1.5, dtype=torch.float64))


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(shard=2, zero=3)], ids=["replicate", "zero3"])
def test_a_module_that_is_given_has_rank_0s_weights_everywhere(plan: Plan) -> None:
    first, second = run_ranks(2, train, plan, True)
    assert first.first_hash == second.first_hash
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


def initial(world: World, plan: Plan, precision: str, seed: int) -> tuple[str, bool]:
    model = parallelize(build, plan, world, precision=precision, seed=seed)  # pyrefly: ignore
    inner = core(model)
    assert isinstance(inner, Llama)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in inner.parameters()]
    distinct = all(part.numel() < 2 or part.unique().numel() > 1 or part.dim() == 1 for part in parts)
    return weights_hash(model), distinct and inner.head.weight is inner.embedding.weight


@pytest.mark.parametrize("seed", [0, 1])
def test_initial_weights_are_one_hash_for_every_plan_and_world_size(seed: int) -> None:
    hashes = set()
    for plan in [Plan(), *PLANS]:
        for found, sound in run_ranks(plan.world_size, initial, plan, "fp32", seed):
            assert sound
            hashes.add(found)
    assert len(hashes) == 1


def test_shards_do_not_repeat_each_others_numbers() -> None:
    """On a CPU, DTensor's own random initialisation gives every rank the same numbers (pytorch#168058)."""
    for rows in run_ranks(2, first_and_last_rows):
        assert not torch.equal(*rows)


def first_and_last_rows(world: World) -> tuple[Tensor, Tensor]:
    model = parallelize(build, Plan(shard=2), world)
    weight = model.get_parameter("blocks.0.feed_forward.up.weight")
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor().detach()
    return whole[: DIMS.ffn // 2], whole[DIMS.ffn // 2 :]


def refused(world: World, plan: Plan) -> str:
    try:
        parallelize(build, plan, world)
    except ValueError as error:
        return str(error)
    return ""


def test_what_cannot_be_spread_is_refused_by_name() -> None:
    assert "plan.expert = 2" in run_ranks(2, refused, Plan(shard=2, expert=2))[0]
    assert "4 ranks" in run_ranks(2, refused, Plan(shard=4))[0]


class NotAModule:
    pass


def test_a_builder_that_builds_no_module_is_named() -> None:
    with pytest.raises(TypeError, match="NotAModule"):
        run_ranks(1, build_nothing)


def build_nothing(world: World) -> nn.Module:
    return parallelize(NotAModule, Plan(), world)  # pyrefly: ignore
