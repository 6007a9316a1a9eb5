"""The repeated blocks of a model are found, and those that share parameters stay together."""

from __future__ import annotations

import pytest
from torch import nn

from shoal.models.units import find_units, group_by_shared_parameters
from tests.parallel.models import Awkward, Layer


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in find_units(model)]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_blocks_in_a_list_are_units(container: type) -> None:
    model = nn.ModuleDict(
        {
            "in": nn.Linear(2, 2),
            "body": container([Layer(2), Layer(2)])
            if container is nn.ModuleList
            else container(Layer(2), Layer(2)),
        }
    )
    assert names(model) == ["body.0", "body.1"]


def test_only_the_outermost_list_counts() -> None:
    model = nn.Module()
    model.outer = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    assert names(model) == ["outer.0", "outer.1"]


def test_two_stacks_are_both_found() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList(Layer(2) for _ in range(2))
    model.decoder = nn.ModuleList(Layer(3) for _ in range(2))
    assert names(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([nn.ReLU(), nn.ReLU()])],
)
def test_a_model_without_repeated_blocks_has_no_units(model: nn.Module) -> None:
    assert names(model) == []


def test_units_that_share_a_parameter_are_one_group() -> None:
    model = Awkward()
    groups = group_by_shared_parameters(model, find_units(model))
    assert sorted(sorted(unit.name for unit in group) for group in groups) == [
        ["layers.0", "layers.2"],
        ["layers.1"],
    ]


def test_a_unit_that_shares_with_the_root_is_left_to_the_root() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    model.root = nn.Linear(3, 3)
    model.root.weight = model.blocks[1].weight  # pyrefly: ignore
    groups = group_by_shared_parameters(model, find_units(model))
    assert [[unit.name for unit in group] for group in groups] == [["blocks.0"]]
