"""What any plan saves, any other plan loads, to the bit: weights, buffers and the state of the optimizer.

Each plan trains a step and saves once. Then each loads what others saved, and whole tensors, gathered from its ranks, have the
hash of those that were saved, gathered from theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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

MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": partial(Llama, DEEP._replace(layers=2)),
    "deep": partial(Llama, DEEP),
    "moe": partial(Moe, MOE),
}
DENSE: dict[str, dict[str, Any]] = {
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
    "context x shard": {"context": 2, "shard": 2},
}
STAGES: dict[str, dict[str, Any]] = {
    "one device": {},
    "zero 3": {"shard": 2, "zero": 3},
    "interleaved x tensor": {"pipeline": 2, "tensor": 2, "micro_batch": 4, "schedule": "interleaved_1f1b"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "zero 3": {"shard": 2, "zero": 3},
    "expert": {"shard": 2, "expert": 2},
    "expert, zero 1": {"shard": 2, "expert": 2, "zero": 1},
    "expert 4 x shard": {"shard": 4, "expert": 4},
    "expert x tensor": {"shard": 2, "tensor": 2, "expert": 2},
}
PLANS = {"dense": DENSE, "deep": STAGES, "moe": EXPERTS}
LOADS = {1: 100, 2: 3, 4: 1}
"""by ranks: how many of the plans after it in the list one loads, besides one device; those on few ranks are quick"""


class Case(NamedTuple):
    """A plan and whose checkpoint it loads; None: it trains and saves its own."""

    model: str
    name: str
    load: str | None = None

    @property
    def plan(self) -> Plan:
        return Plan.model_validate(PLANS[self.model][self.name])


def cases() -> list[Case]:
    return [Case(model, name) for model, plans in PLANS.items() for name in plans]


def sources(case: Case) -> list[str]:
    """The plans whose checkpoints one loads: one device, and those that follow in a ring."""
    names = [*PLANS[case.model]]
    at = names.index(case.name)
    after = [name for name in names[at + 1 :] + names[:at] if name != "one device"]
    return ["one device"] * (case.name != "one device") + after[: LOADS[case.plan.world_size]]


def pairs() -> list[Case]:
    return [case._replace(load=source) for case in cases() for source in sources(case)]


def set_up(world: World, case: Case) -> Step:
    model = parallelize(MODELS[case.model], case.plan, world, precision="fp32", seed=7)
    return Step(model, NextToken(), OPTIMIZER, case.plan, world, precision="fp32", total_steps=4)


def hashes(state: dict[str, Tensor]) -> dict[str, str]:
    """Of whole tensors. Collective among the ranks that hold them."""
    return {name: digest for names in alike(state) for name, digest in hashes_of(names, state).items()}


def alike(state: dict[str, Tensor]) -> list[list[str]]:
    """Names of tensors that are cut in the same way: gathered together they take a third of the time."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        cut = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault((cut, tensor.dtype, tensor.shape), []).append(name)
    return [*groups.values()]


def hashes_of(names: list[str], state: dict[str, Tensor]) -> dict[str, str]:
    first = state[names[0]]
    if isinstance(first, DTensor):
        local = torch.stack([cast(DTensor, state[name]).to_local() for name in names], -1)
        shape = torch.Size([*first.shape, len(names)])
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = first.device_mesh, first.placements
        stacked = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        wholes = whole_tensor(stacked).unbind(-1)
    else:
        wholes = [state[name] for name in names]
    return {
        name: hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, whole in zip(names, wholes, strict=True)
    }


def train_and_save(world: World, case: Case, folder: Path) -> dict[str, str]:
    step = set_up(world, case)
    step(part_of(global_batch(0), 0, case.plan, world.rank))
    state = model_state(step.model) | step.state()
    save(folder, 1, state, {}, world, keep=2)
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

    def on_all(
        fn: Callable[..., Any], argument: Callable[[Case], object]
    ) -> dict[tuple[str, str], list[Any]]:
        found = {}
        for ranks in (1, 2, 4):
            mine = {case[:2]: (case, argument(case)) for case in cases() if case.plan.world_size == ranks}
            found |= {key: outcome.get() for key, outcome in run_all(ranks, fn, mine).items()}
        return found

    saved = on_all(train_and_save, lambda case: folder / f"{case.model}-{case.name}")
    loaded = on_all(load_all, lambda case: {name: folder / f"{case.model}-{name}" for name in sources(case)})
    return Matrix({key: merged(by_rank) for key, by_rank in saved.items()}, loaded)


def merged(by_rank: list[dict[str, str]]) -> dict[str, str]:
    return {name: value for rank in by_rank for name, value in rank.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", pairs(), ids=lambda case: f"{case.model}: {case.load} to {case.name}")
def test_what_one_plan_saved_another_loads(case: Case, matrix: Matrix) -> None:
    assert case.load is not None
    found = merged([rank[case.load] for rank in matrix.loaded[case.model, case.name]])
    assert found == matrix.saved[case.model, case.load]


def test_every_plan_loads_and_is_loaded_by_others() -> None:
    for case in cases():
        assert len(sources(case)) >= 2
        assert sum(case.name in sources(other) for other in cases() if other.model == case.model) >= 2


def test_the_page_says_how_many_pairs_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert len(pairs()) >= 60 and f"{len(pairs())} pairs of plans" in page


def test_what_was_saved_holds_the_state_of_the_optimizer_and_differs_between_plans(matrix: Matrix) -> None:
    for hashed in matrix.saved.values():
        assert any(name.endswith("exp_avg_sq") for name in hashed)
    assert len({tuple(sorted(hashed.items())) for hashed in matrix.saved.values()}) > len(matrix.saved) // 2
