"""Ordinary modules that are easy to get wrong: complex buffers, numpy weights, `.item()`, branches, shared stacks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.data.cut import MicroBatch, StepBatch
from shoal.job import Precision
from shoal.parallel import shard
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import weights_hash
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.train.objective import Supervised
from shoal.train.optimizer import SGD, AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import Outcome, run_all, run_ranks
from tests.train.toy import whole_weights

SPREAD = [Plan(replicate=2), Plan(shard=2, zero=2), Plan(shard=2, zero=3)]
IDS = ["replicate", "zero2", "zero3"]


class Rotating(nn.Module):
    """Holds complex numbers, as rotary positions may be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.tensor([0.5, 1.5])))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.layer(x).float().reshape(-1, 2, 2)) * self.turn
        return torch.view_as_real(turned).reshape(-1, 4).to(x.dtype)


class Drawn(nn.Module):
    """Weights from numpy and from Python's random."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(np.random.randn(4, 4)) + random.random())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Rates(nn.Module):
    """Reads numbers out of tensors while it is built."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 2)]
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in rates)
        self.rates = rates

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.layers, self.rates, strict=True):
            x = layer(x) * (1 + rate)
        return x


class Branches(nn.Module):
    """Can be initialised by name, and takes one of two branches by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 4)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0, 0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return (self.low if x[0, 0] < 0 else self.high)(x)


class TwoNames(nn.Module):
    """One stack of blocks under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder = nn.ModuleDict({"blocks": self.encoder})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        return x


class Dicts(nn.Module):
    """Its blocks are containers, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = torch.tanh(layer["two"](layer["one"](x)))
        return x


class Image(nn.Module):
    """A convolution whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, None, None].expand(-1, -1, 3, 3)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean((2, 3))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(
    world: World, build: Callable[[], nn.Module], plan: Plan
) -> tuple[str, list[float], dict[str, Tensor]]:
    model = parallelize(build, plan, world, precision="fp64", seed=2)
    first = weights_hash(model)
    step = Step(model, Supervised(mse), AdamW(lr=1e-2), plan, world, precision="fp64")
    losses = []
    for index in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(index + 1), dtype=torch.float64)
        local = 4 // plan.data_degree
        at = plan.data_rank(world.rank) * local
        micro = [MicroBatch((x[i : i + 1], x.flip(0)[i : i + 1]), i, 1) for i in range(at, at + local)]
        losses.append(step(StepBatch(index, tuple(micro))).loss)
    return first, losses, whole_weights(model)


BUILDERS = [Rotating, Drawn, Rates, Branches, TwoNames, Dicts, Image]


@functools.cache
def trained(ranks: int) -> dict[tuple[Any, Plan], Outcome]:
    plans = [Plan()] if ranks == 1 else SPREAD
    return run_all(ranks, train, {(build, plan): (build, plan) for build in BUILDERS for plan in plans})


@pytest.mark.parametrize("plan", SPREAD, ids=IDS)
@pytest.mark.parametrize("build", BUILDERS)
def test_it_trains_as_on_one_device(build: Callable[[], nn.Module], plan: Plan) -> None:
    first, losses, weights = trained(1)[build, Plan()].get()[0]
    for seen in trained(2)[build, plan].get():
        assert seen[0] == first
        assert seen[1] == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(seen[2][name], weight, rtol=0, atol=1e-10, msg=name)


def train_as_on_older_torch(world: World, plan: Plan) -> tuple[str, list[float], dict[str, Tensor]]:
    with (
        patch.object(shard, "is_needed", lambda: True),
        patch.object(shard, "_count_unused", lambda module: None),
    ):
        return train(world, Branches, plan)


@pytest.mark.parametrize("zero", [2, 3])
def test_branches_also_work_with_torch_before_2_13(zero: int) -> None:
    _, losses, weights = run_ranks(1, train, Branches, Plan())[0]
    for seen in run_ranks(
        2, train_as_on_older_torch, Plan.model_validate({"shard": 2, "zero": zero, "micro_batch": 1})
    ):
        assert seen[1] == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(seen[2][name], weight, rtol=0, atol=1e-10, msg=name)


class OneLayer(nn.Linear):
    """Whose data come in whatever type."""

    def __init__(self) -> None:
        super().__init__(4, 4)


def loss_of(world: World, plan: Plan, precision: Precision, given: torch.dtype) -> float:
    model = parallelize(OneLayer, plan, world, precision=precision, seed=2)
    step = Step(model, Supervised(mse), AdamW(lr=1e-2), plan, world, precision=precision)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(given)
    first = plan.data_rank(world.rank) * 2 if plan.data_degree > 1 else 0
    part = x[first : first + 4 // plan.data_degree]
    return step(StepBatch(0, (MicroBatch((part, part), first, len(part)),))).loss


@pytest.mark.parametrize(
    ("precision", "given"), [("fp64", torch.float32), ("fp32", torch.float64), ("bf16", torch.float64)]
)
def test_data_of_another_type_are_cast_whatever_the_plan(precision: Precision, given: torch.dtype) -> None:
    (alone,) = run_ranks(1, loss_of, Plan(), precision, given)
    rounding = 1e-2 if precision == "bf16" else 1e-6
    for plan in SPREAD:
        losses = run_ranks(2, loss_of, plan, precision, given)
        assert losses == pytest.approx([alone] * 2, rel=rounding)


def buffer_of(world: World) -> Tensor:
    return core(parallelize(Rotating, Plan(), world, precision="bf16")).get_buffer("turn")


def test_a_complex_buffer_stays_complex() -> None:
    (turn,) = run_ranks(1, buffer_of)
    assert torch.equal(turn, Rotating().get_buffer("turn"))


class Hidden:
    """An output that torch cannot look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hides(Rates):
    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


def hidden_mse(output: Hidden, target: Tensor) -> Tensor:
    return mse(output.value, target)


def train_hidden(world: World, plan: Plan) -> float:
    model = parallelize(Hides, plan, world)
    step = Step(model, Supervised(hidden_mse), AdamW(), plan, world)
    return step(StepBatch(0, (MicroBatch((torch.ones(2, 4), torch.ones(2, 4)), 0, 2),))).loss


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(shard=2)], ids=["replicate", "shard"])
def test_an_output_without_visible_tensors_is_refused_and_not_trained_on_one_rank_alone(plan: Plan) -> None:
    with pytest.raises(TypeError, match="returned Hidden"):
        run_ranks(2, train_hidden, plan)


def overflow_first(world: World) -> float:
    model = parallelize(Rates, Plan(), world)
    step = Step(model, Supervised(mse), SGD(lr=1e-3, momentum=0.9), Plan(), world)
    for index, scale in enumerate((float("inf"), 1.0, 1.0)):
        x = torch.ones(2, 4)
        step(StepBatch(index, (MicroBatch((x, x * scale), index * 2, 2),)))
    return max(weight.abs().max().item() for weight in whole_weights(model).values())


def test_momentum_begins_at_zero_also_after_a_skipped_first_step() -> None:
    junk = [torch.full((4, 4), 1e30) for _ in range(64)]
    del junk
    assert run_ranks(1, overflow_first)[0] < 10
