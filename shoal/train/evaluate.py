"""Evaluation over a held-out set: each sample counted once, whatever the ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.data.cut import MicroBatch, StepBatch
from shoal.parallel.apply import synchronise_buffers
from shoal.parallel.shard import reshard
from shoal.parallel.spread import Spread, spread_of
from shoal.plan import AttentionKernel
from shoal.train.kernels import attention_kernels
from shoal.train.objective import Objective, output_of
from shoal.train.step import as_scalar, to_device
from shoal.world import World


class Evaluation(NamedTuple):
    loss: float
    """mean over the held-out set"""
    weight: int
    """what it is a mean of: tokens or samples"""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[StepBatch],
    world: World,
    attention: AttentionKernel | None = None,
) -> Evaluation:
    """The mean loss of the held-out set, in evaluation mode. Collective; the same on all ranks.

    Args:
        attention: as in the plan.
    """
    synchronise_buffers(model, world)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    spread = spread_of(model)
    model.eval()
    with attention_kernels(world.device, attention):
        for batch in batches:
            total += _sums(model, objective, batch.micro_batches, spread, world)
    reshard(model)
    if world.size > 1:
        dist.all_reduce(total)
    model.train()
    summed, weight = total.tolist()
    return Evaluation(summed / weight if weight else float("nan"), round(weight))


def _sums(
    model: nn.Module, objective: Objective, micro_batches: Sequence[MicroBatch], spread: Spread, world: World
) -> Tensor:
    """(sum of losses, weight) of micro-batches, on the ranks that tell them."""
    data = [spread.cut_inputs(to_device(micro.data, world.device)) for micro in micro_batches]
    sums = torch.zeros(len(data), 2, dtype=torch.float64, device=world.device)

    def run(index: int, last: bool) -> Tensor:
        output = output_of(objective, model, data[index])
        if not last:
            return output
        loss = objective.loss(output, data[index])
        if micro_batches[index].samples and spread.counts:
            sums[index] = torch.stack((loss.sum.double(), as_scalar(loss.weight, sums)))
        return loss.sum.expand(1).clone()

    if spread.pipeline is not None:
        spread.pipeline.step(run, len(data), train=False)
    else:
        for index in range(len(data)):
            run(index, True)
    return sums.sum(0)
