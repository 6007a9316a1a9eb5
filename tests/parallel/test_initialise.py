"""Weights that are left to be loaded, and given after all where nothing is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import give_weights
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.world import World
from tests.ranks import run_ranks


class ByName(nn.Module):
    """Initialised by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.turn = nn.Parameter(torch.empty(2, dtype=torch.complex64), requires_grad=False)
        self.place = nn.Parameter(torch.empty(3, dtype=torch.long), requires_grad=False)
        self.register_buffer("start", torch.empty(3))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.fill_(len(name))

    def init_buffers(self) -> None:
        self.start.copy_(self.weight.sum(0))


class Strict(ByName):
    """Whose buffers cannot be set beside weights of zeros."""

    def init_buffers(self) -> None:
        if not self.weight.any():
            raise RuntimeError("weights of zeros")
        super().init_buffers()


class ForReal(nn.Module):
    """Built for real, since it asks for a value, and yet has a way to be initialised by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), 7.0))
        self.size = int(self.weight.sum().item())

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.zero_()


def values(model: nn.Module) -> dict[str, Tensor]:
    named = (*core(model).named_parameters(), *core(model).named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def empty_then_given(world: World, kind: type[nn.Module]) -> list[dict[str, Tensor]]:
    """What a model has as usual; without weights; when they are given; when they are given again."""
    plan = Plan(replicate=world.size)
    usual = values(parallelize(kind, plan, world, seed=3))
    model = parallelize(kind, plan, world, seed=3, weights=False)
    found = [usual, values(model)]
    for _ in range(2):
        give_weights(model, 3)
        found.append(values(model))
        with torch.no_grad():
            core(model).get_parameter("weight").add_(1.0)  # as a step would
    return found


@pytest.mark.parametrize("kind", [ByName, Strict, ForReal])
def test_a_model_is_given_the_weights_and_buffers_that_it_would_have_had(kind: type[nn.Module]) -> None:
    ((usual, empty, given, again),) = run_ranks(1, empty_then_given, kind)
    assert all(torch.equal(given[name], tensor) for name, tensor in usual.items())
    assert torch.equal(again["weight"], usual["weight"] + 1)  # they are given once
    if kind is ByName:
        assert empty["weight"].isnan().all() and empty["turn"].isnan().all() and not empty["place"].any()
        assert not empty["start"].any()  # of zeros
    else:
        assert all(torch.equal(empty[name], tensor) for name, tensor in usual.items())
