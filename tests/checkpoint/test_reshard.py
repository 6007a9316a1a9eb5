"""What any plan saves, any other plan loads, to the bit: weights, buffers and the state of the optimizer.

Each plan trains two steps and saves once. Then each loads what each other saved, and whole tensors, gathered from its ranks, have
the hash of those that were saved, gathered from theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.store import load, model_state, save
from shoal.models.llama import Llama
from shoal.models.moe import Moe
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import whole_tensor
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_all
from tests.train.moe_toy import DIMS as MOE
from tests.train.toy import DEEP, OPTIMIZER, global_batch, part_of

MODELS: dict[str, Callable[[], nn.Module]] = {"dense": partial(Llama, DEEP), "moe": partial(Moe, MOE)}
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "replicate 2": {"replicate": 2},
    "zero 1": {"shard": 2, "zero": 1},
    "zero 2 on 4": {"shard": 4, "zero": 2},
    "zero 3": {"shard": 2, "zero": 3},
    "zero 3 on 4": {"shard": 4, "zero": 3},
    "hybrid": {"replicate": 2, "shard": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "tensor x shard": {"tensor": 2, "shard": 2},
    "pipeline": {"pipeline": 2, "micro_batch": 4},
    "interleaved x tensor": {"pipeline": 2, "tensor": 2, "micro_batch": 4, "schedule": "interleaved_1f1b"},
    "context x shard": {"context": 2, "shard": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "zero 3": {"shard": 2, "zero": 3},
    "expert": {"shard": 2, "expert": 2},
    "expert, zero 1": {"shard": 2, "expert": 2, "zero": 1},
    "expert 4 x shard": {"shard": 4, "expert": 4},
    "expert x tensor": {"shard": 2, "tensor": 2, "expert": 2},
}


class Case(NamedTuple):
    """A plan and whose checkpoint it loads; None: it trains and saves its own."""

    model: str
    name: str
    load: str | None = None

    @property
    def plan(self) -> Plan:
        return Plan.model_validate((PLANS if self.model == "dense" else EXPERTS)[self.name])


def pairs() -> list[Case]:
    return [
        Case(model, target, source)
        for model, plans in (("dense", PLANS), ("moe", EXPERTS))
        for target in plans
        for source in plans
        if source != target
    ]


def set_up(world: World, case: Case) -> Step:
    model = parallelize(MODELS[case.model], case.plan, world, precision="fp32", seed=7)
    return Step(model, NextToken(), OPTIMIZER, case.plan, world, precision="fp32", total_steps=4)


def hashes(state: dict[str, Tensor]) -> dict[str, str]:
    """Of whole tensors. Collective among the ranks that hold them."""
    return {
        name: hashlib.sha256(
            whole_tensor(tensor).contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        if tensor.dim()
        else str(tensor.item())
        for name, tensor in state.items()
    }


def train_and_save(world: World, case: Case, folder: Path) -> dict[str, str]:
    step = set_up(world, case)
    for index in range(2):
        step(part_of(global_batch(index), index, case.plan, world.rank))
    state = model_state(step.model) | step.state()
    save(folder, 2, state, {}, world, keep=2)
    return hashes(state)


def load_all(world: World, case: Case, sources: dict[str, Path]) -> dict[str, dict[str, str]]:
    step = set_up(world, case)
    found = {}
    for name, folder in sources.items():
        state = model_state(step.model) | step.state()
        load(list_checkpoints(folder)[0][-1], state, world, rest=True)
        found[name] = hashes(state)
    return found


class Matrix(NamedTuple):
    saved: dict[tuple[str, str], dict[str, str]]
    loaded: dict[tuple[str, str], list[dict[str, dict[str, str]]]]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("matrix")
    cases = {
        (model, name): Case(model, name)
        for model, plans in (("dense", PLANS), ("moe", EXPERTS))
        for name in plans
    }
    saved: dict[tuple[str, str], dict[str, str]] = {}
    loaded = {}
    for ranks in (1, 2, 4):
        mine = {
            key: (case, folder / "-".join(key))
            for key, case in cases.items()
            if case.plan.world_size == ranks
        }
        for key, outcome in run_all(ranks, train_and_save, mine).items():
            saved[key] = {name: value for rank in outcome.get() for name, value in rank.items()}
    for ranks in (1, 2, 4):
        mine = {
            key: (
                case,
                {
                    name: folder / f"{key[0]}-{name}"
                    for model, name in cases
                    if model == key[0] and name != key[1]
                },
            )
            for key, case in cases.items()
            if case.plan.world_size == ranks
        }
        for key, outcome in run_all(ranks, load_all, mine).items():
            loaded[key] = outcome.get()
    return Matrix(saved, loaded)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", pairs(), ids=lambda case: f"{case.model}: {case.load} to {case.name}")
def test_every_plan_loads_what_every_other_saved(case: Case, matrix: Matrix) -> None:
    assert case.load is not None
    right = matrix.saved[case.model, case.load]
    found = {
        name: value
        for rank in matrix.loaded[case.model, case.name]
        for name, value in rank[case.load].items()
    }
    assert found == right


def test_the_page_says_how_many_pairs_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert len(pairs()) >= 60 and f"{len(pairs())} pairs of plans" in page


def test_what_was_saved_holds_the_state_of_the_optimizer_and_differs_between_plans(matrix: Matrix) -> None:
    for hashed in matrix.saved.values():
        assert any(name.endswith("exp_avg_sq") for name in hashed)
    assert len({tuple(sorted(hashed.items())) for hashed in matrix.saved.values()}) > len(matrix.saved) // 2
