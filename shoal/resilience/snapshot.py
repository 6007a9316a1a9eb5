"""A rank's state in memory that its launcher holds: what a run goes on from when ranks are started again on the same machine.

The memory has no name in a file system and is gone with the last process that has it open: nothing is left behind, however all of
them end. Each rank has its own, with room for two states, so that one is whole while the other is written.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.world import World

KEPT = "SHOAL_KEPT"
"""the environment variable of a rank that names its memory"""
SLOTS = 2
_HEADER = struct.Struct("<32sqq")  # digest of what is kept, steps done in each slot (or EMPTY)
_HEADER_BYTES, _ALIGNED_BYTES = 4096, 64
EMPTY = -1


@contextmanager
def held(ranks: int) -> Generator[list[str]]:
    """Memory for so many ranks while the block runs, by paths that other processes of this user open.

    Raises:
        ValueError: this system has no such memory (Linux has).
    """
    if ranks and sys.platform != "linux":
        raise ValueError("checkpoint.memory_every needs Linux; use checkpoint.every")
    files = (
        [os.memfd_create(f"shoal-rank-{rank}") for rank in range(ranks)] if sys.platform == "linux" else []
    )
    try:
        yield [f"/proc/{os.getpid()}/fd/{file}" for file in files]
    finally:
        for file in files:
            os.close(file)


class Place(NamedTuple):
    """Where a tensor lies in a slot."""

    name: str
    offset: int
    nbytes: int


class Snapshots:
    """One rank's side: takes states, and gives back the newest that all ranks have.

    Args:
        path: of the memory. state: tensors by name, which are the same ones at every step.
        about: what else must be the same for a state to be taken up again, such as the plan.
    """

    def __init__(self, path: str, state: Mapping[str, Tensor], about: str) -> None:
        self._places, self._slot_bytes = _places(state)
        digest = hashlib.sha256(about.encode())
        for name, tensor in sorted(state.items()):
            digest.update(f"{name} {tuple(_local(tensor).shape)} {tensor.dtype}\n".encode())
        self._digest = digest.digest()
        self._memory = opened(path, _HEADER_BYTES + SLOTS * self._slot_bytes)
        self._header = self._memory[:_HEADER_BYTES].numpy().data
        if _HEADER.unpack_from(self._header)[0] != self._digest:  # new memory, or of another state
            self._write_header([EMPTY] * SLOTS)

    @property
    def steps(self) -> list[int]:
        """Steps done in the state of each slot, or EMPTY."""
        return list(_HEADER.unpack_from(self._header)[1:])

    def take(self, done: int, state: Mapping[str, Tensor]) -> None:
        """Copy the state after `done` steps over the older of the two that are there."""
        steps = self.steps
        slot = steps.index(min(steps))
        steps[slot] = EMPTY
        self._write_header(steps)  # a kill from here on finds the other one whole
        for place in self._places:
            tensor = _local(state[place.name])
            self._part(slot, place, tensor).copy_(tensor)
        steps[slot] = done
        self._write_header(steps)

    def newest(self, world: World) -> int | None:
        """Steps done in the newest state that all ranks have; None if there is none. Collective."""
        import torch
        import torch.distributed as dist

        mine = torch.tensor(self.steps, dtype=torch.int64, device=world.device)
        if world.size == 1:
            return max((step for step in mine.tolist() if step != EMPTY), default=None)
        everyone = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(everyone, mine)
        common = set.intersection(*(set(steps.tolist()) for steps in everyone)) - {EMPTY}
        return max(common, default=None)

    def give_back(self, done: int, state: Mapping[str, Tensor]) -> None:
        """Copy the state after `done` steps, which is there, into tensors, in place; newer ones are forgotten."""
        steps = self.steps
        slot = steps.index(done)
        for place in self._places:
            tensor = _local(state[place.name])
            tensor.copy_(self._part(slot, place, tensor))
        self._write_header([step if step <= done else EMPTY for step in steps])

    def forget(self) -> None:
        """Give back nothing any more: the run goes on from elsewhere."""
        self._write_header([EMPTY] * SLOTS)

    def _part(self, slot: int, place: Place, like: Tensor) -> Tensor:
        """The copy of a tensor that a slot has, of its type and shape."""
        start = _HEADER_BYTES + slot * self._slot_bytes + place.offset
        return self._memory[start : start + place.nbytes].view(like.dtype).view(like.shape)

    def _write_header(self, steps: list[int]) -> None:
        _HEADER.pack_into(self._header, 0, self._digest, *steps)


def open_snapshots(every: int, state: Callable[[], Mapping[str, Tensor]], about: str) -> Snapshots | None:
    """This rank's memory, if the job asks for copies; else `state`, which makes the optimizer's, is not called.

    Raises:
        ValueError: the launcher that started this rank holds no memory for it.
    """
    if not every:
        return None
    path = os.environ.get(KEPT)
    if path is None:
        raise ValueError(
            f"checkpoint.memory_every = {every} needs the launcher of `shoal train`, which holds the memory; started by another "
            "launcher use checkpoint.every"
        )
    return Snapshots(path, state(), about)


def opened(path: str, nbytes: int) -> Tensor:
    """The launcher's memory at a path, which is made so large if it is smaller, as bytes that both see."""
    import torch

    file = os.open(path, os.O_RDWR)
    try:
        if os.fstat(file).st_size < nbytes:
            os.truncate(file, nbytes)
        return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        with suppress(OSError):
            os.close(file)


def _places(state: Mapping[str, Tensor]) -> tuple[list[Place], int]:
    places, offset = [], 0
    for name, tensor in sorted(state.items()):
        nbytes = _local(tensor).nbytes
        places.append(Place(name, offset, nbytes))
        offset += -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return places, offset


def _local(tensor: Tensor) -> Tensor:
    from shoal.train.optimizer import local

    return local(tensor)
