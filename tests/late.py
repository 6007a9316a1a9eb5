"""Lanes whose copies are made as late as a device may make them: when something waits for them, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import shoal.parallel.offload
import shoal.train.streamed


class LateLane:
    """Stands for `Lane`: what is not waited for shows as a wrong number."""

    def __init__(self, device: torch.device) -> None:
        self.asked: list[tuple[Tensor, Tensor]] = []
        self.made = 0

    @contextmanager
    def run(self) -> Iterator[None]:
        with _Noted(self.asked):
            yield

    def mark(self) -> LateMark:
        return LateMark(self, len(self.asked))

    def make(self, count: int) -> None:
        for target, source in self.asked[self.made : count]:
            target.copy_(source)
        self.made = max(self.made, count)


class LateMark:
    def __init__(self, lane: LateLane | None = None, count: int = 0) -> None:
        self.lane, self.count = lane, count

    def wait(self) -> None:
        if self.lane is not None:
            with torch.no_grad():
                self.lane.make(self.count)


class _Noted(TorchFunctionMode):
    """Copies are noted and not made."""

    def __init__(self, asked: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._asked = asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.copy_:
            self._asked.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


def copy_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test, copies of offload are late."""
    for module in (shoal.parallel.offload, shoal.train.streamed):
        monkeypatch.setattr(module, "Lane", LateLane)
