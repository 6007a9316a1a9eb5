"""The optimizer step that one would write by hand in plain PyTorch, for the overhead of the product's `Step`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.data.cut import StepBatch
from shoal.job import Optimizer
from shoal.models.llama import Llama
from shoal.models.presets import LlamaDims
from shoal.parallel.initialise import fill
from shoal.plan import Plan
from shoal.world import World


def step_by_hand(
    dims: LlamaDims, optimizer: Optimizer, plan: Plan, world: World, seed: int
) -> Callable[[StepBatch], float]:
    """A step over one micro-batch: forward, backward, clip, update; returns the loss over all ranks.

    The model starts from the weights of `seed`, as the product's does, in DistributedDataParallel, or sharded as ZeRO-3.
    """
    model = Llama(dims)
    fill(model, model.init_parameter, seed)
    whole = _sharded(model, plan, world) if plan.shard > 1 else _replicated(model)
    update = torch.optim.AdamW(
        _groups(whole, optimizer), lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
    )

    def step(batch: StepBatch) -> float:
        (micro,) = batch.micro_batches
        logits = whole(micro.data["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), micro.data["labels"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), optimizer.clip)
        update.step()
        update.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / world.size

    return step


def _replicated(model: Llama) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _sharded(model: Llama, plan: Plan, world: World) -> Llama:
    mesh = world.mesh(plan)["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def _groups(model: nn.Module, optimizer: Optimizer) -> list[dict]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
