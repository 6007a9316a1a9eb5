"""A tiny job with ragged labels, its plain-torch reference, and the same job through `parallelize` and `Step`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.cut import MicroBatch, StepBatch, cut_for
from shoal.job import Optimizer, Precision
from shoal.models.llama import Llama
from shoal.models.presets import LlamaDims
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import seed_of, weights_hash, whole_tensor
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.schedule import learning_rate
from shoal.train.step import Step
from shoal.world import World
from tests.data.sources import Place

DIMS = LlamaDims(
    dim=24, layers=2, heads=4, kv_heads=2, ffn=40, vocab=50, tied=True, rope_theta=10000.0, norm_eps=1e-5
)  # 24 x 50 embedding and 40-wide layers: rows that do not divide by 4
BATCH, LENGTH, STEPS = 16, 12, 6  # all of the warmup, and as many steps after it
OPTIMIZER = Optimizer(lr=1e-2, schedule="cosine", warmup=3, clip=0.5, weight_decay=0.1)


class Record(NamedTuple):
    """What a run gave: equal for every plan."""

    initial_hash: str
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


DEEP = DIMS._replace(layers=4, vocab=52)
"""Enough blocks for 4 stages, and a vocabulary for 4 ranks"""


def build(dims: LlamaDims = DIMS) -> nn.Module:
    return Llama(dims)


def global_batch(step: int) -> dict[str, Tensor]:
    """Tokens and labels of a step; samples keep 0 to all of their labels, so that no two ranks weigh the same."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, DIMS.vocab, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    kept = torch.randint(0, LENGTH + 1, (BATCH, 1), generator=generator)
    kept[step % BATCH] = 0
    labels[torch.arange(LENGTH)[None] >= kept] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def part_of(batch: dict[str, Tensor], step: int, plan: Plan, rank: int) -> StepBatch:
    """A rank's part of a global batch."""
    cut = cut_for(plan, Place(rank, plan.world_size), BATCH)
    micro = [
        MicroBatch({k: v[at : at + cut.size] for k, v in batch.items()}, step * BATCH + at, cut.size)
        for at in range(cut.offset, cut.offset + cut.local, cut.size)
    ]
    return StepBatch(step, tuple(micro))


def run_plan(
    world: World,
    plan: Plan,
    precision: Precision,
    optimizer: Optimizer = OPTIMIZER,
    steps: int = STEPS,
    dims: LlamaDims = DIMS,
    *,
    ahead: bool = False,
) -> Record:
    """Train the toy job under a plan."""
    model = parallelize(partial(build, dims), plan, world, precision=precision, seed=7)
    initial = weights_hash(model)
    step = Step(
        model,
        NextToken(),
        optimizer,
        plan,
        world,
        precision=precision,
        total_steps=steps,
        usual_weight=BATCH * LENGTH / 2,
    )
    results = [
        step(part_of(global_batch(index), index, plan, world.rank), ahead=ahead and index < steps - 1)
        for index in range(steps)
    ]
    return Record(
        initial,
        [result.loss for result in results],
        [result.grad_norm for result in results],
        whole_weights(model),
    )


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_tensor(p.detach()).clone() for name, p in core(model).named_parameters()}


def run_by_hand(
    dtype: torch.dtype, optimizer: Optimizer = OPTIMIZER, steps: int = STEPS, dims: LlamaDims = DIMS
) -> Record:
    """The same job in plain torch: one process, whole batches, torch's own clipping and unfused optimizer."""
    torch.manual_seed(0)
    model = build(dims).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            whole = torch.empty(p.shape, dtype=torch.float32)
            model.init_parameter(name, whole, torch.Generator().manual_seed(seed_of(7, name)))  # pyrefly: ignore
            p.copy_(whole)
    initial = weights_hash(model)
    torch_optimizer = _torch_optimizer(model, optimizer)
    losses, norms = [], []
    for index in range(steps):
        batch = global_batch(index)
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip or float("inf")).item())
        for group in torch_optimizer.param_groups:
            group["lr"] = learning_rate(optimizer, index, steps)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        losses.append(loss.item())
    return Record(initial, losses, norms, whole_weights(model))


def _torch_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, foreach=False)
    return torch.optim.SGD(
        groups, lr=1.0, momentum=settings.momentum, nesterov=settings.nesterov, foreach=False
    )
