"""The toy job with a mixture-of-experts model: in plain torch, token by token, and through `parallelize` and `Step`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.moe import MixtureOfExperts, Moe
from shoal.models.moe_presets import MoeDims
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import seed_of, weights_hash
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.schedule import learning_rate
from shoal.train.step import Step
from shoal.world import World
from tests.models.naive_moe import naive_moe
from tests.train.toy import BATCH, DEEP, LENGTH, OPTIMIZER, global_batch, part_of, whole_weights

STEPS = 3
DIMS = MoeDims(
    base=DEEP._replace(layers=2, ffn=12),
    experts=4,
    top_k=2,
    expert_ffn=20,
    scoring="softmax",
    balance_rate=0.02,  # of scores about 1/4: large enough to send tokens elsewhere
)


class Record(NamedTuple):
    """What a run gave: equal for every plan."""

    initial_hash: str
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in core(model).named_buffers() if name.endswith("bias")}


def set_up(world: World, plan: Plan, dims: MoeDims = DIMS, steps: int = STEPS) -> Step:
    """The toy job's step in fp64, with the model in it."""
    model = parallelize(lambda: Moe(dims), plan, world, precision="fp64", seed=7)
    return Step(
        model,
        NextToken(),
        OPTIMIZER,
        plan,
        world,
        precision="fp64",
        total_steps=steps,
        usual_weight=BATCH * LENGTH / 2,
    )


def train(
    world: World, plan: Plan, dims: MoeDims = DIMS, steps: int = STEPS, never: tuple[int, ...] = ()
) -> Record:
    """Train the toy job under a plan; experts `never` get no token, by a bias that no score reaches."""
    step = set_up(world, plan, dims, steps)
    model = step.model
    initial = weights_hash(model)
    _forbid(model, never)
    results = [step(part_of(global_batch(index), index, plan, world.rank)) for index in range(steps)]
    numbers = [result.loss for result in results], [result.grad_norm for result in results]
    return Record(initial, *numbers, whole_weights(model), biases(model))


def _forbid(model: nn.Module, never: tuple[int, ...]) -> None:
    for name, bias in core(model).named_buffers():
        if name.endswith("bias"):
            bias[list(never)] = -100.0


def train_by_hand(dims: MoeDims = DIMS, steps: int = STEPS, never: tuple[int, ...] = ()) -> Record:
    """The same in plain torch: one process, whole batches, torch's own clipping and optimizer, every token on its own."""
    model = Moe(dims).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            whole = torch.empty(p.shape, dtype=torch.float32)
            model.init_parameter(name, whole, torch.Generator().manual_seed(seed_of(7, name)))
            p.copy_(whole)
    _forbid(model, never)
    initial = weights_hash(model)
    layers = [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]
    counts: dict[MixtureOfExperts, list[int]] = {}
    for layer in layers:
        layer.forward = _told(layer, counts)  # pyrefly: ignore
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    losses, norms = [], []
    for index in range(steps):
        batch = global_batch(index)
        loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, index, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for layer, got in counts.items():
            mean = sum(got) / len(got)
            for expert, count in enumerate(got):
                layer.router.bias[expert] += dims.balance_rate * ((count < mean) - (count > mean))
    return Record(initial, losses, norms, whole_weights(model), biases(model))


def _told(layer: MixtureOfExperts, counts: dict[MixtureOfExperts, list[int]]):  # noqa: ANN202
    def forward(x: Tensor) -> Tensor:
        output, counts[layer] = naive_moe(layer, x)
        return output

    return forward
