"""The record of a deep model that is made from a shallow one is that of the deep model, event by event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.cluster import Cluster
from shoal.models.llama import Llama
from shoal.plan import Plan
from shoal.planner import extend as extend_module
from shoal.planner.cost import costs_of
from shoal.planner.extend import KEPT, simulate_extended
from shoal.planner.memory import Memory, memory_of
from shoal.planner.repeat import NotPeriodicError, extend
from shoal.planner.replay import replay
from shoal.planner.simulate import simulate
from shoal.planner.trace import Trace
from tests.planner.real import DIMS, work

DEEP = 9


def deep(layers: int) -> nn.Module:
    return Llama(DIMS._replace(layers=layers))


def trace(plan: Plan, layers: int, on: str = "h100") -> Trace:
    cluster = Cluster.parse(f"{plan.world_size} {on}")
    return simulate(work(partial(deep, layers)), plan, cluster)


def sizes(found: Trace) -> list[tuple[bool, int, str, str, str]]:
    """What happens, in order: allocated or released, how much, where, for which parameter."""
    return [
        (event >= 0, storage.nbytes, moment.phase, moment.unit, storage.name)
        for index, event in found.memory()
        for moment, storage in [(found.moments[index], found.storages[event if event >= 0 else ~event])]
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"shard": 2, "micro_batch": 2},
        {"shard": 2, "zero": 2, "tensor": 2},
        {"shard": 2, "recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
        {"context": 2},
        {"offload": ("activations",)},
    ],
    ids=str,
)
def test_the_longer_record_is_the_deep_models(keys: dict[str, Any]) -> None:
    plan = Plan.model_validate({**keys, "compile": False})
    kept = KEPT + 2 * (plan.recompute_every - 1)
    kept += (DEEP - kept) % plan.recompute_every
    made = extend(trace(plan, kept), kept, DEEP, plan.recompute_every)
    right = trace(plan, DEEP)
    assert facts(made, plan) == facts(right, plan)
    assert [size for size in sizes(made) if size[3]] == [size for size in sizes(right) if size[3]]
    times = [
        replay({0: found}, costs_of(Cluster.parse(f"{plan.world_size} h100"))) for found in (made, right)
    ]
    assert times[0].seconds == pytest.approx(times[1].seconds, rel=1e-3)
    assert times[0].ranks[0].parts == pytest.approx(times[1].ranks[0].parts, rel=1e-2, abs=1e-6)


def facts(found: Trace, plan: Plan) -> dict[str, Any]:
    """What is told of memory, but for the phase in which there is a number for each parameter, of 512 bytes."""
    memory: Memory = memory_of(found, plan, "cuda")
    phases = {phase: peak for phase, peak in memory.phases.items() if phase != "reduce"}
    return memory._asdict() | {"peak": memory.peak._replace(largest=[]), "phases": phases}


def test_copies_whose_buckets_end_within_blocks_are_simulated_whole() -> None:
    assert not extend_module._repeats(Plan(replicate=2))
    assert extend_module._repeats(Plan(replicate=2, shard=2))


class Uneven(nn.Module):
    """Blocks of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8 * (1 + number % 2)), nn.Linear(8 * (1 + number % 2), 8))
            for number in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def count_blocks(build: Callable[[], nn.Module]) -> int:
    return extend_module.alike_blocks(work(build))


def test_blocks_are_counted_where_they_are_alike() -> None:
    assert count_blocks(partial(deep, 9)) == 9
    assert count_blocks(Uneven) == 0
    assert count_blocks(lambda: nn.Linear(2, 2)) == 0


def test_what_is_not_alike_is_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Trace:
        raise NotPeriodicError

    monkeypatch.setattr(extend_module, "extend", refuse)
    found = simulate_extended(work(partial(deep, KEPT + 1)), Plan(), Cluster.parse("1 cpu"))
    assert {f"blocks.{number}" for number in range(KEPT + 1)} <= {moment.unit for moment in found.moments}


def test_a_record_that_does_not_repeat_is_refused() -> None:
    found = trace(Plan(), 4, "cpu")
    with pytest.raises(NotPeriodicError):
        extend(found, 2, 8)
    assert torch.is_grad_enabled()
