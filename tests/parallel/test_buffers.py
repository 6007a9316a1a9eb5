"""Buffers: running statistics become one mean over ranks, and see each batch once; constants stay to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.data.cut import MicroBatch, StepBatch
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
