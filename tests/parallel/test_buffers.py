"""Buffers: running statistics become one mean over ranks, and see each batch once; constants stay to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.data.cut import MicroBatch, StepBatch
from shoal.layout import Layout
from shoal.parallel.apply import parallelize, synchronise_buffers
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.train.objective import Supervised
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks


class Blocks(nn.Module):
    """Two blocks with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def statistics(world: World, recompute: str) -> dict[str, Tensor]:
    plan = Plan.model_validate({"recompute": recompute})
    model = parallelize(Blocks, plan, world, seed=1)
    step = Step(model, Supervised(mse), AdamW(lr=1e-2), plan, world)
    for index in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
        step(StepBatch(index, (MicroBatch((x, x.flip(0)), index * 8, 8),)))
    return {name: buffer.clone() for name, buffer in core(model).named_buffers()}


def test_recomputing_a_block_does_not_count_its_batch_twice() -> None:
    kept, recomputed = (run_ranks(1, statistics, recompute)[0] for recompute in ("none", "full"))
    assert kept["layers.0.1.num_batches_tracked"] == 3
    for name, buffer in kept.items():
        assert torch.equal(recomputed[name], buffer), name


class Replacing(nn.Module):
    """A block that puts other tensors in its buffers' places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.linear(x)) + self.mean


class Staged(nn.Module):
    """Blocks that a pipeline can cut."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.end_layer = nn.Linear(4, 4)

    def layout(self) -> Layout:
        return Layout(blocks="blocks", end=("end_layer",))

    def begin(self, x: Tensor) -> Tensor:
        return x

    def side_inputs(self, x: Tensor) -> tuple[()]:
        return ()

    def end(self, x: Tensor) -> Tensor:
        return self.end_layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.end(x)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))


def counted(world: World, block: type[nn.Module], plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of 3 steps of 4 micro-batches, and the buffers that this rank has after them."""
    model = parallelize(partial(Staged, block), plan, world, precision="fp64", seed=1)
    step = Step(model, Supervised(mse), AdamW(lr=1e-2), plan, world, precision="fp64")
    losses = []
    for index in range(3):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        micro = [MicroBatch((x[i : i + 4], x.flip(0)[i : i + 4]), index * 16 + i, 4) for i in range(0, 16, 4)]
        losses.append(step(StepBatch(index, tuple(micro))).loss)
    return losses, {name: buffer.clone() for name, buffer in core(model).named_buffers()}


@pytest.mark.parametrize(
    "keys",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"pipeline": 2},
        {"pipeline": 2, "recompute": "full"},
        {"pipeline": 2, "schedule": "gpipe", "recompute": "selective"},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [Normed, Replacing])
def test_buffers_of_blocks_see_each_batch_once(block: type[nn.Module], keys: dict[str, Any]) -> None:
    plan = Plan.model_validate({**keys, "micro_batch": 4})
    losses, buffers = run_ranks(1, counted, block, Plan(micro_batch=4))[0]
    found: dict[str, Tensor] = {}
    for told, held in run_ranks(plan.world_size, counted, block, plan):
        assert told == pytest.approx(losses, rel=1e-12)
        found |= held
    assert found.keys() == buffers.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-14, msg=name)


def averaged(world: World) -> tuple[Tensor, Tensor, Tensor]:
    module = nn.Module()
    module.register_buffer("constant", 1 / 10_000 ** (torch.arange(64).float() / 64))
    module.register_buffer("statistic", torch.tensor([float(world.rank), 7.0]))
    before = module.get_buffer("constant").clone()
    for _ in range(5):
        synchronise_buffers(module, world)
    return before, module.get_buffer("constant"), module.get_buffer("statistic")


@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_are_averaged_and_constants_do_not_drift(ranks: int) -> None:
    for before, constant, statistic in run_ranks(ranks, averaged):
        assert torch.equal(constant, before)
        assert statistic.tolist() == [(ranks - 1) / 2, 7.0]
