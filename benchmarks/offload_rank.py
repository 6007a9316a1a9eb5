"""One rank of the check in `benchmarks/offload.py`: a small fp32 model with and without offload, step for step."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shoal.parallel.offload
import shoal.train.streamed
from shoal.checkpoint.store import load, model_state, newest, save
from shoal.config import Settings
from shoal.data.cut import MicroBatch, StepBatch
from shoal.launch.worker import StopFlag
from shoal.models.llama import Llama
from shoal.models.presets import LlamaDims
from shoal.observe.status import RankStatus
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import whole_tensor
from shoal.parallel.replicate import core
from shoal.parallel.shard import reshard
from shoal.plan import Plan
from shoal.run import write_whole
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World

DIMS = LlamaDims(
    dim=128, layers=4, heads=4, kv_heads=2, ffn=352, vocab=2048, tied=True, rope_theta=10000.0, norm_eps=1e-5
)
BATCH, LENGTH, STEPS, SAVED_AFTER = 8, 256, 5, 2
OFFLOADS: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("activations",),
    ("parameters",),
    ("optimizer", "parameters", "activations"),
)
PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"micro_batch": 2}, {"micro_batch": 2, "recompute": "full"}, {"micro_batch": 4, "compile": True}],
    2: [
        {"replicate": 2, "micro_batch": 2},
        {"shard": 2, "zero": 1, "micro_batch": 2},
        {"shard": 2, "zero": 2, "micro_batch": 2},
        {"shard": 2, "zero": 3, "micro_batch": 2, "recompute": "full"},
        {"shard": 2, "zero": 3, "compile": True},
        {"tensor": 2, "micro_batch": 4},
        {"context": 2, "micro_batch": 4},
        {"pipeline": 2, "micro_batch": 2},
        {"pipeline": 2, "micro_batch": 2, "schedule": "interleaved_1f1b"},
        {"pipeline": 2, "micro_batch": 2, "schedule": "interleaved_zero_bubble", "recompute": "full"},
    ],
}
MOST = 2e-5  # fp32 rounding after some steps of AdamW, where a plan takes other kernels; usually it is 0
NOISE = 10.0  # times what two equal runs differ by, where the device's kernels add up in any order


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]


def check(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Compare every kind of offload with none, under every plan for so many ranks."""
    shoal.parallel.offload.KEPT_BYTES = 4096  # small tensors are moved, too
    shoal.train.streamed.BUCKET_BYTES = 1 << 19  # and many buckets
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # new memory is then not a number until it is written
    status.enter("check", 0)
    cases: list[dict[str, Any]] = []
    for keys in PLANS[world.size]:
        right, here = train(world, keys, ()), len(cases)
        for offload in OFFLOADS:
            cases.append(compared(world, keys, offload, partial(train, world, keys, offload), right))
        again = partial(resumed, world, keys, Path(settings.run.dir) / f"saved-{here}")
        cases.append(compared(world, keys, (*OFFLOADS[-1], "resumed"), again, right))
        limit = max(MOST, NOISE * cases[here].get("weights", 0.0))
        for case in cases[here:]:  # what is not a number is not the same
            case["same"] = case.get("loss", math.inf) <= limit and case.get("weights", math.inf) <= limit
        if world.is_main:
            write_whole(Path(settings.run.dir) / "result.json", json.dumps({"cases": cases}))


def compared(
    world: World,
    keys: dict[str, Any],
    offload: tuple[str, ...],
    run: Callable[[], Trained],
    right: Trained,
) -> dict[str, Any]:
    """One case. A rank that fails fails the launch if others wait for it; alone, it is a case that failed."""
    case: dict[str, Any] = {"plan": named(keys), "offload": list(offload)}
    try:
        return case | difference(run(), right)
    except Exception as error:
        if world.size > 1:
            raise
        return case | {"problem": str(error)[:200], "traceback": traceback.format_exc()[-2000:]}


def resumed(world: World, keys: dict[str, Any], folder: Path) -> Trained:
    """All offloaded, saved and loaded into a new model in the middle."""
    offload = OFFLOADS[-1]
    model, step = built(world, keys, offload)
    first = steps(world, keys, step, range(SAVED_AFTER))
    save(folder, SAVED_AFTER, model_state(model) | step.state(), {}, world, keep=1)
    del model, step
    found, _ = newest(folder, world)
    assert found is not None
    model, step = built(world, keys, offload)
    load(found, model_state(model) | step.state(), world)
    losses = first + steps(world, keys, step, range(SAVED_AFTER, STEPS))
    return Trained(losses, weights_of(model))


def difference(found: Trained, right: Trained) -> dict[str, Any]:
    """The largest difference of losses and of weights, each against the largest of the right ones; 0 if equal to the bit."""
    losses, expected = torch.tensor(found.losses), torch.tensor(right.losses)
    weights = torch.stack(
        [
            (found.weights[name] - value).abs().max() / value.abs().max()
            for name, value in right.weights.items()
        ]
    )
    return {"loss": ((losses - expected) / expected).abs().max().item(), "weights": weights.max().item()}


def named(keys: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in keys.items()) or "one device"


def train(world: World, keys: dict[str, Any], offload: tuple[str, ...]) -> Trained:
    model, step = built(world, keys, offload)
    return Trained(steps(world, keys, step, range(STEPS)), weights_of(model))


def built(world: World, keys: dict[str, Any], offload: tuple[str, ...]) -> tuple[torch.nn.Module, Step]:
    plan = Plan.model_validate({"compile": False, **keys, "offload": offload})
    model = parallelize(lambda: Llama(DIMS), plan, world, seed=1)
    return model, Step(model, NextToken(), AdamW(lr=1e-3, clip=1.0), plan, world, usual_weight=BATCH * LENGTH)


def steps(world: World, keys: dict[str, Any], step: Step, numbers: range) -> list[float]:
    plan = Plan.model_validate(keys)
    return [step(batch_of(number, plan, world)).loss for number in numbers]


def batch_of(number: int, plan: Plan, world: World) -> StepBatch:
    count, size = plan.micro_batches(BATCH)
    first = plan.data_rank(world.rank) * count * size
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, DIMS.vocab, (BATCH, LENGTH + 1), generator=generator)[
        first : first + count * size
    ]
    return StepBatch(
        number,
        tuple(
            MicroBatch(
                {"tokens": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()},
                number * BATCH + first + index * size,
                size,
            )
            for index, part in enumerate(tokens.split(size))
        ),
    )


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """This rank's parameters, whole, on the CPU."""
    reshard(model)
    return {name: whole_tensor(p.detach()).cpu().clone() for name, p in core(model).named_parameters()}
