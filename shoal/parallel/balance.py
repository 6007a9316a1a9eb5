"""Layers that keep experts equally busy: their counts of tokens, added up over the global batch once a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Balanced(Protocol):
    """A module that counts its experts' tokens in a buffer and can be told to act on the counts; a model may have its own."""

    load: Tensor
    """(experts,) whole numbers: tokens since the last optimizer step, while `counting`"""
    counting: bool

    def rebalance(self, skip: Tensor) -> None:
        """Act on `load`, now of the global batch, and set it to zero; where `skip` is true only that."""
        ...


class Balance:
    """The balanced layers of a model, or none. Every rank that holds a layer moves it by the same numbers.

    Args:
        groups: over which, one after the other, sums over all tokens of this rank's layers are taken; none: the whole world.
    """

    def __init__(self, model: nn.Module, groups: Iterable[dist.ProcessGroup]) -> None:
        self._layers = _balanced(model)
        self._groups = tuple(groups)

    @property
    def has_layers(self) -> bool:
        return bool(self._layers)

    def count(self, on: bool) -> None:
        """Whether tokens of the next forward count."""
        for layer in self._layers:
            layer.counting = on

    @torch.no_grad()
    def sum_loads(self) -> None:
        """Add up the counts of all ranks. Collective."""
        if not self._layers or not dist.is_initialized():
            return
        loads = torch.cat([layer.load for layer in self._layers])
        for group in self._groups or (dist.group.WORLD,):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(loads, group=group)
        parts = loads.split([len(layer.load) for layer in self._layers])
        for layer, part in zip(self._layers, parts, strict=True):
            layer.load.copy_(part)

    @torch.no_grad()
    def rebalance(self, skip: Tensor) -> None:
        """Act on the counts; nothing is sent."""
        for layer in self._layers:
            layer.rebalance(skip)


def _balanced(part: nn.Module) -> list[Balanced]:
    modules: list[Any] = list(part.modules())
    return [module for module in modules if callable(getattr(module, "rebalance", None))]
