"""An update of what is in host memory, bucket by bucket, is to the bit the update of what is on the device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.train.streamed
from shoal.checkpoint.folder import inspect
from shoal.checkpoint.store import load, model_state, save
from shoal.job import Optimizer
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.optimizer import AtOnce
from shoal.train.step import Step
from shoal.train.streamed import ALIGNED, Streamed, _cut
from shoal.world import World
from tests.late import copy_late
from tests.ranks import run_ranks
from tests.train.toy import DEEP, OPTIMIZER, build, global_batch, part_of, whole_weights

SGD = Optimizer(name="sgd", lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1)
SHAPES = {"large": (40, 25), "vector": (7,), "empty": (0, 5), "scalar": (), "last": (3, 11)}
SMALL = 4000  # bytes: large parts are cut, and every place is used many times


def parts_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def steps_with(updater: Any, parts: dict[str, nn.Parameter], count: int = 4) -> list[Tensor]:
    """Values and state after some steps, of which the second is skipped."""
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        for part in parts.values():
            part.grad = torch.randn(part.shape, generator=generator).to(part.dtype)
        divisor = torch.tensor(
            3.0, dtype=torch.promote_types(next(iter(parts.values())).dtype, torch.float32)
        )
        with torch.no_grad():
            updater.step(1e-2, divisor, torch.tensor(index == 1))
    state = [value for name in parts for _, value in sorted(updater.state_of(name).items())]
    return [tensor.detach().clone() for tensor in (*parts.values(), *state)]


@pytest.mark.parametrize(
    "settings", [OPTIMIZER, SGD, SGD.model_copy(update={"momentum": 0.0, "nesterov": False})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("moments", "masters"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 10**6])
def test_buckets_change_no_bit(
    settings: Optimizer, dtype: torch.dtype, moments: bool, masters: bool, bucket_bytes: int
) -> None:
    plain = parts_of(dtype)
    right = steps_with(AtOnce(settings, plain, plain), plain)
    parts = parts_of(dtype)
    streamed = Streamed(
        settings,
        parts,
        parts,
        torch.device("cpu"),
        moments=moments,
        bring_all=masters,
        bucket_bytes=bucket_bytes,
    )
    for found, expected in zip(steps_with(streamed, parts), right, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 10**6])
def test_what_is_not_there_yet_is_waited_for(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = parts_of(torch.float32)
    right = steps_with(AtOnce(OPTIMIZER, plain, plain), plain)
    copy_late(monkeypatch)
    parts = parts_of(torch.float32)
    streamed = Streamed(
        OPTIMIZER,
        parts,
        parts,
        torch.device("cpu"),
        moments=True,
        bring_all=True,
        bucket_bytes=bucket_bytes,
    )
    for found, expected in zip(steps_with(streamed, parts), right, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [ALIGNED, 5 * ALIGNED, 10**4])
def test_every_element_is_in_one_bucket(size: int) -> None:
    parts = parts_of(torch.float32)
    starts, buckets = _cut(parts, size)
    seen: dict[str, list[int]] = {name: [] for name in parts}
    for number, bucket in enumerate(buckets):
        assert bucket.first == number * size and bucket.length <= size
        assert len({piece.name for piece in bucket.pieces}) == len(bucket.pieces)
        for piece in bucket.pieces:
            assert piece.at % ALIGNED == 0 and bucket.first + piece.at == starts[piece.name] + piece.first
            seen[piece.name] += range(piece.first, piece.last)
    assert seen == {name: list(range(part.numel())) for name, part in parts.items()}
    ends = [piece.name for bucket in buckets for piece in bucket.pieces if piece.ends]
    assert sorted(ends) == sorted(parts)


def test_what_is_brought_is_given_back_after_the_step() -> None:
    parts = parts_of(torch.float32)
    streamed = Streamed(
        OPTIMIZER, parts, parts, torch.device("cpu"), moments=True, bring_all=True, bucket_bytes=SMALL
    )
    before = {name: part.data_ptr() for name, part in parts.items()}
    steps_with(streamed, parts, 1)
    assert {name: part.data_ptr() for name, part in parts.items()} == before
    for bucket in streamed._buckets:
        assert bucket.optimizer is not None and not bucket.optimizer.state
        assert all(stand.numel() == 0 and stand.grad is None for stand in bucket.stands.values())


def resumed(world: World, plan: Plan, folder: str, saves: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Steps 0 to 5 with a checkpoint after 3, or steps 3 to 5 from that checkpoint."""
    shoal.train.streamed.BUCKET_BYTES = SMALL
    model = parallelize(functools.partial(build, DEEP), plan, world, precision="fp32", seed=7)
    step = Step(model, NextToken(), OPTIMIZER, plan, world, total_steps=6)
    losses, first = [], 0
    if not saves:
        found = inspect(next(Path(folder).glob("step-*")))
        load(found, model_state(model) | step.state(), world)  # pyrefly: ignore[bad-argument-type]
        first = 3
    for index in range(first, 6):
        losses.append(step(part_of(global_batch(index), index, plan, world.rank)).loss)
        if saves and index == 2:
            save(Path(folder), 3, model_state(model) | step.state(), {}, world, keep=1)
    return losses[-3:], whole_weights(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"offload": ["optimizer"]}, {"offload": ["optimizer"]}),
        ({"shard": 2}, {"shard": 2, "offload": ["optimizer", "parameters"]}),
        ({"shard": 2, "offload": ["optimizer", "parameters"]}, {"shard": 2}),
    ],
)
def test_a_run_goes_on_to_the_bit_with_and_without_offload(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    first, second = Plan.model_validate(before), Plan.model_validate(after)
    right = run_ranks(first.world_size, resumed, first, str(tmp_path), True)
    found = run_ranks(second.world_size, resumed, second, str(tmp_path), False)
    for (losses, weights), (right_losses, right_weights) in zip(found, right, strict=True):
        assert losses == right_losses
        assert all(torch.equal(weight, right_weights[name]) for name, weight in weights.items())
