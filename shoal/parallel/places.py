"""Weights are ready to be gathered when they have been updated: see [Note: filled places] in `direct`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shoal.parallel.direct import Gather, gather_first, gathers_of, groups_of_root
from shoal.parallel.gather8 import narrow_weight_of
from shoal.parallel.shard import groups_of, is_gathered, reshard

KINDS = (torch.bfloat16, torch.float16)
Key = TypeVar("Key", bound=Hashable)


class Ready(NamedTuple, Generic[Key]):
    """What an update leaves of parts of weights beside, for the next gather; of some of them, by name or by part."""

    places: Mapping[Key, Tensor]
    """where a part is written in 16 bits, too; (n,), all of one type"""
    largest: Mapping[Key, Tensor]
    """what becomes the largest magnitude of a part, fp32 of one element"""


class Places:
    """Where ranks gather parts of a model's weights from, as far as they lie there as they are sent, in 16 bits.

    Args:
        parameters: those that are updated, by name.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model, self._gathers = model, gathers_of(model)
        weights = [narrow_weight_of(each) for gather in self._gathers for each in gather.group.fsdp_params]
        self._scales = list(dict.fromkeys(weight.scales for weight in weights if weight is not None))
        self._names = {parameter: name for name, parameter in parameters.items()}

    def taken(self) -> Ready[str]:
        """By name, to be filled by an update; what is not updated lies there since it was first gathered.

        All ranks must be through with what they gathered from there before.
        """
        found: dict[str, Tensor] = {}
        for gather, places in self._eligible():
            gather.filled = True
            found |= places
        largest: dict[str, Tensor] = {}
        for scales in self._scales:
            names = [self._names.get(weight.parameter) for weight in scales.weights]
            mine = {
                name: one
                for name, one in zip(names, scales.largest.unbind(), strict=True)
                if name is not None
            }
            if len(mine) == len(names):
                scales.found = True
                largest |= mine
        return Ready(found, largest)

    def prepare(self, *, ahead: bool) -> None:
        """Have all ready for a recording of a forward and backward, or a replay of it, which gathers for itself. Collective.

        Args:
            ahead: but for what is needed first: that has been gathered, or is now.
        """
        first = groups_of_root(self._model) if ahead else []
        if any(is_gathered(group) and group not in first for group in groups_of(self._model)):
            reshard(self._model)
        for gather, _ in self._eligible():
            gather.fill()
        for scales in self._scales:
            scales.find()
        if ahead:
            gather_first(self._model)

    def done(self) -> None:
        """What was ready has been used: a replay does not tell the model."""
        self.forget()
        for group in groups_of_root(self._model):
            group.reshard()

    @property
    def nbytes(self) -> int:
        """Memory that this rank lends to others, of which torch's allocator does not know."""
        return sum(peers.nbytes for peers in {gather.peers for gather in self._gathers} if peers is not None)

    def forget(self) -> None:
        """They have been gathered from, or weights were written."""
        for gather in self._gathers:
            gather.forget()

    def _eligible(self) -> list[tuple[Gather, dict[str, Tensor]]]:
        found = []
        for gather in self._gathers:
            places = {self._names[p]: place for p, place in gather.places().items() if p in self._names}
            kinds = {place.dtype for place in places.values()}
            if len(kinds) == 1 and kinds <= set(KINDS):
                found.append((gather, places))
        return found
