"""A simulated rank holds, to the byte, what a real one holds at its peak: for every axis, and everything is undone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal.parallel.offload
from shoal.cluster import Cluster
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.planner.simulate import simulate, simulated_world
from shoal.simulated import is_simulated
from tests.planner.real import DIMS, Expected, balanced_moe, deep, dense, real_peaks, simulated_peak, work
from tests.ranks import run_ranks

SCALARS = 64  # bytes: numbers that torch turns into tensors for an operator, which no mode sees
RANDOM_STATE = (
    5056 + 1
)  # bytes that a recomputed block keeps of torch's generator, which is no tensor of the step

ALONE: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "full", "recompute_every": 2},
    {"offload": ("activations",)},
    {"offload": ("optimizer",)},
    {"offload": ("parameters",)},
]
PAIRS: list[dict[str, Any]] = [
    {"replicate": 2, "micro_batch": 2},
    {"shard": 2, "zero": 3},
    {"shard": 2, "zero": 2, "micro_batch": 2},
    {"tensor": 2},
    {"context": 2},
    {"pipeline": 2, "micro_batch": 2},
]
FOURS: list[dict[str, Any]] = [{"shard": 2, "replicate": 2}, {"tensor": 2, "shard": 2, "recompute": "full"}]
EXPERTS: list[dict[str, Any]] = [{"shard": 2}, {"shard": 2, "expert": 2}]


def named(keys: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items()) or "one device"


def compare(all_keys: list[dict[str, Any]], build: Callable[[], nn.Module] = dense) -> None:
    """Peaks of plans that have one number of ranks."""
    expected = [expect(Plan.model_validate(keys), build) for keys in all_keys]
    size = expected[0].plan.world_size
    real = run_ranks(size, real_peaks, expected, build, timeout=280)
    for index, (keys, each) in enumerate(zip(all_keys, expected, strict=True)):
        for rank, found in each.peaks.items():
            told = real[rank][index]
            assert 0 <= told - found <= each.unseen, f"{named(keys)}, rank {rank}: {told} and {found}"


def expect(plan: Plan, build: Callable[[], nn.Module]) -> Expected:
    """Simulate the ranks of a plan that differ."""
    cluster = Cluster.parse(f"{plan.world_size} cpu")
    ranks = range(plan.world_size) if plan.pipeline > 1 else (0,)
    peaks = {rank: simulated_peak(simulate(work(build), plan, cluster, rank)) for rank in ranks}
    unseen = SCALARS + (RANDOM_STATE * DIMS.layers if plan.recompute != "none" else 0)
    return Expected(plan, peaks, unseen)


@pytest.fixture
def small_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload activations however small."""
    monkeypatch.setattr(shoal.parallel.offload, "KEPT_BYTES", 1)


@pytest.mark.usefixtures("small_moves")
def test_one_device_holds_what_was_simulated() -> None:
    compare(ALONE)


def test_two_ranks_hold_what_was_simulated() -> None:
    compare(PAIRS)


def test_two_ranks_with_two_stages_each_hold_what_was_simulated() -> None:
    compare([{"pipeline": 2, "micro_batch": 2, "schedule": "interleaved_1f1b"}], deep)


def test_four_ranks_on_two_axes_hold_what_was_simulated() -> None:
    compare(FOURS)


def test_experts_with_equally_many_tokens_hold_what_was_simulated() -> None:
    compare(EXPERTS, balanced_moe)


def test_a_model_that_is_built_with_weights_is_spread_over_gpus_too() -> None:
    with simulated_world(Cluster.parse("8 h100"), 3, 8) as world:
        model = parallelize(lambda: nn.Linear(16, 24), Plan(shard=8), world)
        parameter: Any = next(model.parameters())
        local = parameter.to_local()
        assert local.shape == (3, 16) and local.device.type == "cuda"


def test_a_real_step_works_after_a_simulated_one() -> None:
    apply, empty = nn.Module._apply, torch.cuda.Stream
    simulate(work(), Plan(shard=8), Cluster.parse("8 h100"), 3)
    assert nn.Module._apply is apply and torch.cuda.Stream is empty
    assert not dist.is_initialized() and not is_simulated() and not torch.cuda.is_available()
    model = dense()
    loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_what_fails_inside_is_undone_too() -> None:
    with pytest.raises(ZeroDivisionError), simulated_world(Cluster.parse("8 h100"), 0, 8):
        raise ZeroDivisionError
    assert not dist.is_initialized() and not is_simulated()


def test_a_rank_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="rank = 8 is outside of a world of 8 ranks"),
        simulated_world(Cluster(), 8, 8),
    ):
        pass
