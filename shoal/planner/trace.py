"""`Trace`: the record of a simulated step: memory that came and went, and what was launched, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.planner.launch import Launch, Moment


@dataclass(slots=True)
class Storage:
    """Memory that was allocated once."""

    nbytes: int
    device: str
    stream: int
    operator: str
    shape: tuple[int, ...]
    dtype: str
    began: Moment
    ended: Moment | None = None
    kind: str | None = None
    """what it is for, where that is told: see `shoal.planner.memory`"""
    name: str = ""
    """of the parameter that it belongs to"""
    travels: bool = False
    """a collective reads or writes it"""

    def again(self, began: Moment, name: str) -> Storage:
        """The same for another block, micro-batch or rank."""
        return Storage(
            self.nbytes, self.device, self.stream, self.operator, self.shape, self.dtype,
            began, None, self.kind, name, self.travels,
        )  # fmt: skip


class Shape(NamedTuple):
    """What a new tensor is like."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Of the storage that a new one has."""
        last = sum(stride * (size - 1) for size, stride in zip(self.sizes, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize if all(self.sizes) else 0


@dataclass
class Trace:
    """What a tape recorded."""

    storages: list[Storage] = field(default_factory=list)
    events: list[int | Launch] = field(default_factory=list)
    """n: storage n is allocated; ~n: it is released"""
    moments: list[Moment] = field(default_factory=list)
    """of each event"""

    def memory(self, until: int | None = None) -> Iterator[tuple[int, int]]:
        """Events of memory among the first `until`, each with its index."""
        for index, event in enumerate(self.events[:until]):
            if isinstance(event, int):
                yield index, event

    def launches(self) -> Iterator[Launch]:
        """The others."""
        return (event for event in self.events if isinstance(event, Launch))
