"""Mistakes of the kinds that spread training makes in silence, planted into a rank's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from shoal.config import Settings
from shoal.parallel import context, tensor
from shoal.parallel.context import Sequence
from shoal.train.objective import Loss, NextToken
from shoal.train.optimizer import LocalOptimizer
from shoal.train.squares import Squares
from shoal.verify.record import Record, record
from shoal.world import World


@contextmanager
def missing_reduction() -> Iterator[None]:
    """Gradients are not summed over the data axes."""
    with patch.object(
        FSDPModule, "set_requires_gradient_sync", _never(FSDPModule.set_requires_gradient_sync)
    ):
        yield


def _never(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, wanted, **more: real(self, False, **more)


@contextmanager
def wrong_weight() -> Iterator[None]:
    """Each micro-batch is weighed alike, however many labels it has."""
    real = NextToken.loss

    def loss(self: NextToken, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        found = real(self, output, batch)
        return Loss(found.sum / found.weight, 1.0)

    with patch.object(NextToken, "loss", loss):
        yield


@contextmanager
def norm_counted_twice() -> Iterator[None]:
    """A parameter that is on two ranks is counted on both."""
    real = Squares._copies_of
    with patch.object(
        Squares, "_copies_of", lambda self, name, parameter: max(1, real(self, name, parameter) // 2)
    ):
        yield


@contextmanager
def norm_weight_not_summed() -> Iterator[None]:
    """The weight of a norm, which each rank applies to its part of the sequence, keeps that part's gradient."""
    with patch.object(tensor, "sum_gradient", lambda x, group: x):
        yield


@contextmanager
def wrong_positions() -> Iterator[None]:
    """Each rank counts the positions of its part of the sequence from zero."""
    real = context.cut_batch

    def cut(data: Any, sequence: Sequence, layout: Any) -> Any:
        parts = real(data, sequence, layout)
        return {**parts, "positions": torch.arange(parts["tokens"].shape[1])}

    with patch("shoal.parallel.spread.cut_batch", cut):
        yield


@contextmanager
def update_skipped() -> Iterator[None]:
    """One rank keeps its part of the weights as it is."""
    real = LocalOptimizer.step

    def step(self: LocalOptimizer, lr: float, divide_by: Tensor, skip: Tensor, **more: Any) -> None:
        real(self, lr, divide_by, torch.ones_like(skip) if dist.get_rank() == 1 else skip, **more)

    with patch.object(LocalOptimizer, "step", step):
        yield


def record_with(world: World, settings: Settings, fault: Callable[[], Any] | None) -> Record:
    """What a run under a fault computes."""
    if fault is None:
        return record(settings, world)
    with fault():
        return record(settings, world)
