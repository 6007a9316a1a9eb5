"""A rank's state in memory that its launcher holds: what a run goes on from when ranks are started again on the same machine.

The memory has no name in a file system and is gone with the last process that has it open: nothing is left behind, however all of
them end. Each rank has its own, with room for two states, so that one is whole while the other is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.plan import Plan
    from shoal.world import World

KEPT = "SHOAL_KEPT"
"""the environment variable of a rank that names its memory and the others of its launcher, as JSON"""
SLOTS = 2
TOLD = 4  # states of which a rank tells the others
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
    """One rank's side: takes states, and gives back the newest that can be had for all ranks.

    A rank that has none of its own, since it is new or was elsewhere, has that of a rank that holds the same: out of another
    memory of its launcher, or from another machine, over the replicate axis.

    Args:
        path: of this rank's memory. state: tensors by name, which are the same ones at every step.
        about: what else must be the same for a state to be taken up again, such as the place among shards.
        others: further memories of the same launcher.
    """

    def __init__(
        self, path: str, state: Mapping[str, Tensor], about: str, others: Sequence[str] = ()
    ) -> None:
        self._places, self._slot_bytes = _places(state)
        digest = hashlib.sha256(about.encode())
        for name, tensor in sorted(state.items()):
            digest.update(f"{name} {tuple(_local(tensor).shape)} {tensor.dtype}\n".encode())
        self._digest = digest.digest()
        self._path, self._paths = path, [path, *others]
        self._memory: Tensor | None = None
        self._holders: dict[int, list[int]] = {}
        self._mates: list[int] = []

    @property
    def steps(self) -> list[int]:
        """Steps done in the state of each slot of this rank's memory, or EMPTY."""
        said, *steps = _header(self._path)
        return steps if said == self._digest else [EMPTY] * SLOTS

    def take(self, done: int, state: Mapping[str, Tensor]) -> None:
        """Copy the state after `done` steps over the older of the two that are there."""
        memory, steps = self._own(), self.steps
        slot = steps.index(min(steps))
        steps[slot] = EMPTY
        self._write_header(steps)  # a kill from here on finds the other one whole
        for place in self._places:
            tensor = _local(state[place.name])
            self._part(memory, slot, place, tensor).copy_(tensor)
        steps[slot] = done
        self._write_header(steps)

    def newest(self, world: World, plan: Plan) -> int | None:
        """Steps done in the newest state that can be had for all ranks; None if there is none. Collective."""
        import torch
        import torch.distributed as dist

        steps = sorted(self._look(), reverse=True)[:TOLD]
        if world.size == 1:
            return max(steps, default=None)
        mine = torch.tensor(steps + [EMPTY] * (TOLD - len(steps)), device=world.device)
        everyone = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(everyone, mine)
        have = [set(found.tolist()) - {EMPTY} for found in everyone]
        alike: dict[tuple[int, ...], set[int]] = {}
        for rank, found in enumerate(have):
            alike.setdefault(_among_replicas(plan, rank), set()).update(found)
        newest = max(set.intersection(*alike.values()), default=None)
        mates = [
            r for r in range(world.size) if _among_replicas(plan, r) == _among_replicas(plan, world.rank)
        ]
        self._holders = {} if newest is None else {newest: [r for r in mates if newest in have[r]]}
        self._mates = mates
        return newest

    def give_back(self, done: int, state: Mapping[str, Tensor], world: World, plan: Plan) -> None:
        """Copy the state after `done` steps, which `newest` found, into tensors; newer ones are forgotten. Collective."""
        if (where := self._look().get(done)) is not None:
            path, slot = where
            memory = self._opened(path)
            for place in self._places:
                tensor = _local(state[place.name])
                tensor.copy_(self._part(memory, slot, place, tensor))
        if world.size > 1:
            if len(self._holders[done]) < len(self._mates):
                self._spread(state, self._holders[done][0], world, plan)
            world.barrier("state in memory is read")  # from here on memories may be written into
        self._keep_until(done)

    def forget(self) -> None:
        """Give back nothing any more: the run goes on from elsewhere."""
        self._keep_until(EMPTY)

    def _look(self) -> dict[int, tuple[str, int]]:
        """Where each state is that fits this rank: memory and slot by steps done."""
        found: dict[int, tuple[str, int]] = {}
        for path in self._paths:
            said, *steps = _header(path)
            if said == self._digest:
                found = {done: (path, slot) for slot, done in enumerate(steps) if done != EMPTY} | found
        return found

    def _spread(self, state: Mapping[str, Tensor], source: int, world: World, plan: Plan) -> None:
        """From the rank that has it to those that hold the same."""
        import torch.distributed as dist

        group = world.mesh(plan).get_group("replicate")
        for place in self._places:
            tensor = _local(state[place.name])
            if tensor.numel():
                sent = tensor.contiguous()
                dist.broadcast(sent, source, group=group)
                if sent is not tensor:
                    tensor.copy_(sent)

    def _keep_until(self, done: int) -> None:
        """Hold states of this kind from now on; of those that are there, the ones until `done`."""
        kept = [step if step <= done else EMPTY for step in self.steps]
        self._own()
        self._write_header(kept)

    def _own(self) -> Tensor:
        if self._memory is None:
            self._memory = self._opened(self._path)
        return self._memory

    def _opened(self, path: str) -> Tensor:
        return opened(path, _HEADER_BYTES + SLOTS * self._slot_bytes)

    def _part(self, memory: Tensor, slot: int, place: Place, like: Tensor) -> Tensor:
        """The copy of a tensor that a slot has, of its type and shape."""
        start = _HEADER_BYTES + slot * self._slot_bytes + place.offset
        return memory[start : start + place.nbytes].view(like.dtype).view(like.shape)

    def _write_header(self, steps: list[int]) -> None:
        _HEADER.pack_into(self._own()[:_HEADER_BYTES].numpy().data, 0, self._digest, *steps)


def _header(path: str) -> tuple[Any, ...]:
    """Digest and steps of a memory; of a new one, those of nothing."""
    with Path(path).open("rb") as file:
        raw = file.read(_HEADER.size)
    return _HEADER.unpack(raw) if len(raw) == _HEADER.size else (b"", *[EMPTY] * SLOTS)


def _among_replicas(plan: Plan, rank: int) -> tuple[int, ...]:
    """The place of a rank on all axes but replicate: ranks with the same one hold the same state."""
    return tuple(place for axis, place in plan.coordinates(rank).items() if axis != "replicate")


def kept_for(plan: Plan, rank: int) -> str:
    """What must be the same for a rank to take a state up again: how it is cut, and which part of it this rank has."""
    cut = plan.model_dump(include={"pipeline", "shard", "context", "tensor", "expert", "virtual_stages"})
    return f"{cut}, ZeRO-{plan.zero_stage}, {plan.stages_per_rank} stages, part {_among_replicas(plan, rank)}"


def open_snapshots(every: int, state: Callable[[], Mapping[str, Tensor]], about: str) -> Snapshots | None:
    """This rank's memory, if the job asks for copies; else `state`, which makes the optimizer's, is not called.

    Raises:
        ValueError: the launcher that started this rank holds no memory for it.
    """
    if not every:
        return None
    paths = os.environ.get(KEPT)
    if paths is None:
        raise ValueError(
            f"checkpoint.memory_every = {every} needs the launcher of `shoal train`, which holds the memory; started by another "
            "launcher use checkpoint.every"
        )
    own, *others = json.loads(paths)
    return Snapshots(own, state(), about, others)


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
