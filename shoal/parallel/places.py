"""Weights are ready to be gathered when they have been updated: see [Note: filled places] in `direct`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.parallel.direct import Gather, gathers_of

KINDS = (torch.bfloat16, torch.float16)


class Places:
    """Where ranks gather parts of a model's weights from, as far as they lie there as they are sent, in 16 bits.

    Args:
        parameters: those that are updated, by name.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._gathers = gathers_of(model)
        self._names = {parameter: name for name, parameter in parameters.items()}

    def taken(self) -> dict[str, Tensor]:
        """By name, each to be filled now, by an update; what is not updated lies there since it was gathered first.

        All ranks must be through with what they gathered from there before.
        """
        found: dict[str, Tensor] = {}
        for gather, places in self._eligible():
            gather.filled = True
            found |= places
        return found

    def fill(self) -> None:
        """Fill those that no update has filled. Collective."""
        for gather, _ in self._eligible():
            gather.fill()

    @property
    def nbytes(self) -> int:
        """Memory that this rank lends to others, of which torch's allocator does not know."""
        return sum(peers.nbytes for peers in {gather.peers for gather in self._gathers} if peers is not None)

    def forget(self) -> None:
        """They have been gathered from, or weights were written."""
        for gather in self._gathers:
            gather.filled = False

    def _eligible(self) -> list[tuple[Gather, dict[str, Tensor]]]:
        found = []
        for gather in self._gathers:
            places = {self._names[p]: place for p, place in gather.places().items() if p in self._names}
            kinds = {place.dtype for place in places.values()}
            if len(kinds) == 1 and kinds <= set(KINDS):
                found.append((gather, places))
        return found
