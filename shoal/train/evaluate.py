"""Evaluation over a held-out set: each sample counted once, whatever the ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shoal.data.cut import StepBatch
from shoal.parallel.apply import spread_of, synchronise_buffers
from shoal.parallel.shard import reshard
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
    model: nn.Module, objective: Objective, batches: Iterable[StepBatch], world: World
) -> Evaluation:
    """The mean loss of the held-out set, in evaluation mode. Collective; the same on all ranks."""
    synchronise_buffers(model, world)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    spread = spread_of(model)
    model.eval()
    with attention_kernels(world.device):
        for batch in batches:
            for micro in batch.micro_batches:
                data = spread.cut_inputs(to_device(micro.data, world.device))
                loss = objective.loss(output_of(objective, model, data), data)
                if micro.samples and spread.counts:
                    total += torch.stack((loss.sum.double(), as_scalar(loss.weight, total)))
    reshard(model)
    if world.size > 1:
        dist.all_reduce(total)
    model.train()
    summed, weight = total.tolist()
    return Evaluation(summed / weight if weight else float("nan"), round(weight))
