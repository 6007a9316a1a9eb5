"""A model that is no language model is cut by its own small table, and a table that is wrong says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data.cut import MicroBatch, StepBatch
from shoal.layout import Layout
from shoal.parallel.apply import parallelize
from shoal.parallel.layout import layout_of, modules_named
from shoal.plan import Plan
from shoal.train.objective import Supervised
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import whole_weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Mixer(nn.Module):
    """Residual two-layer blocks with biases and norms, between two layers that no axis cuts."""

    def __init__(self, table: Layout | None = None) -> None:
        super().__init__()
        self.table = table
        self.enter = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(8, 2)

    def layout(self) -> Layout | None:
        return self.table

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


TABLE = Layout(
    column=("layers.*.mix.0",),
    row=("layers.*.mix.2",),
    region=("layers.*.mix",),
    counts={"the hidden width": 12},
)


def mixed() -> nn.Module:
    return Mixer(TABLE)


def dropping() -> nn.Module:
    """With dropout outside of regions, where ranks of the tensor axis have the same numbers."""
    model = Mixer(TABLE)
    for layer in model.layers:
        layer.register_module("norm", nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.3)))
    return model


def train(
    world: World, plan: Plan, build: Callable[[], nn.Module] = mixed
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = parallelize(build, plan, world, precision="fp64", seed=3)
    step = Step(model, Supervised(nn.functional.mse_loss), AdamW(lr=1e-2), plan, world, precision="fp64")
    results = []
    for index in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        count, size = plan.micro_batches(8)
        first = plan.data_rank(world.rank) * count * size
        micro = [
            MicroBatch((x[i : i + size], x[i : i + size, :2]), i, size)
            for i in range(first, first + count * size, size)
        ]
        results.append(step(StepBatch(index, tuple(micro))))
    return [r.loss for r in results], [r.grad_norm for r in results], whole_weights(model)


@pytest.mark.parametrize(
    "plan",
    [Plan(tensor=2), Plan(tensor=4, micro_batch=2), Plan(tensor=2, shard=2), Plan(tensor=2, replicate=2)],
    ids=lambda plan: plan.describe(),
)
def test_a_model_without_sequences_is_cut_over_tensor(plan: Plan) -> None:
    losses, norms, weights = run_ranks(1, train, Plan())[0]
    for found in run_ranks(plan.world_size, train, plan):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(tensor=2, shard=2, micro_batch=4)], ids=["2", "2 x 2"])
def test_ranks_that_compute_alike_draw_alike(plan: Plan) -> None:
    losses, norms, weights = run_ranks(1, train, Plan(micro_batch=plan.micro_batch), dropping)[0]
    for found in run_ranks(plan.world_size, train, plan, dropping):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=1e-11, msg=name)


def refused(world: World, table: Layout | None, plan: Plan) -> str:
    try:
        parallelize(lambda: Mixer(table), plan, world)
    except ValueError as error:
        return str(error)
    return ""


WRONG: list[tuple[Layout | None, dict[str, Any], str]] = [
    (None, {"tensor": 2}, "Mixer has no layout that says how it can be cut"),
    (replace(TABLE, column=("layers.*.up",)), {"tensor": 2}, "no module of Mixer is named 'layers.*.up'"),
    (replace(TABLE, column=("layers.*.norm",)), {"tensor": 2}, "'layers.0.norm' is LayerNorm"),
    (replace(TABLE, counts={"the hidden width": 9}), {"tensor": 2}, "does not divide the hidden width = 9"),
    (
        replace(TABLE, counts={}, column=("leave",), row=()),
        {"tensor": 4},
        "does not divide dim 0 of Linear.weight",
    ),
    (TABLE, {"pipeline": 2}, "Mixer has no method begin, side_inputs, end"),
]


@pytest.mark.parametrize(("table", "plan", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_table_that_does_not_fit_says_where(
    table: Layout | None, plan: dict[str, Any], message: str
) -> None:
    ranks = Plan.model_validate(plan)
    for found in run_ranks(ranks.world_size, refused, table, ranks):
        assert message in found


def test_patterns_name_parts_of_a_path_and_not_more() -> None:
    model = mixed()
    assert list(modules_named(model, "layers.*.norm")) == [f"layers.{i}.norm" for i in range(3)]
    assert list(modules_named(model, "layers.*")) == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(ValueError, match="no module"):
        modules_named(model, "layers.*.*.0.*")


def test_a_layout_is_a_layout() -> None:
    model = nn.Linear(2, 2)
    assert layout_of(model, Plan()) is None
    model.__dict__["layout"] = {"column": []}
    with pytest.raises(TypeError, match=r"Linear\.layout gives dict; expected a shoal\.Layout"):
        layout_of(model, Plan())
    assert shoal.Layout is Layout
