"""Compiled blocks hold, to the byte, what was simulated without a compiler: real ones are compiled by Inductor, for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.cluster import Cluster
from shoal.plan import Plan
from shoal.planner.simulate import simulate
from tests.planner.real import simulated_peak, work
from tests.planner.test_simulate import compare

# so did, where it was tried: without recompute; compile = "model"; tensor = 2; shard = 2 with micro-batches. A real compilation
# takes 10 to 30 s of a core
ALONE: list[dict[str, Any]] = [{"compile": True, "recompute": "selective"}]


def test_a_compiled_model_holds_what_was_simulated() -> None:
    compare(ALONE)


@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline": 2, "micro_batch": 2},
        {"context": 2, "shard": 2},
    ],
    ids=str,
)
def test_compiled_blocks_of_a_gpu_hold_less_than_eager_ones(keys: dict[str, Any]) -> None:
    plan = Plan.model_validate({**keys, "compile": True})
    cluster = Cluster.parse(f"{plan.world_size} h100")
    compiled, eager = (
        simulated_peak(simulate(work(), each, cluster), "cuda")
        for each in (plan, plan.model_copy(update={"compile": False}))
    )
    assert compiled < eager


def test_afterwards_compile_is_torchs_own() -> None:
    before = torch.compile
    simulate(work(), Plan(compile=True), Cluster.parse("1 h100"))
    assert torch.compile is before

    @torch.compile(backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
