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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.resilience.epochs import EPOCH
from shoal.resilience.exchange import Neighbours, receive, send, tell_all

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.plan import Plan
    from shoal.world import World

KEPT = "SHOAL_KEPT"
"""the environment variable of a rank that has its `Kept`, as JSON"""
SLOTS = 2
_HEADER = struct.Struct("<32sq4q")  # digest of what is kept, bytes of a slot, and for each slot its `State`
_HEADER_BYTES, _ALIGNED_BYTES = 4096, 64
EMPTY = -1
LINEAGES = 1000  # that a run can have in one epoch


class State(NamedTuple):
    """Which state a slot has, the later the larger."""

    lineage: int
    """another one whenever a run goes on from elsewhere than its memory: what came of the former one is given up"""
    step: int


NONE = State(EMPTY, EMPTY)


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


class Kept(NamedTuple):
    """Memories that a launcher holds, as one of its ranks sees them."""

    own: str
    all: list[str]
    guest: str | None = None
    """for what a rank of another machine copies here"""
    machine: int = 0
    """a number that the launcher's ranks share"""


class Place(NamedTuple):
    """Where a tensor lies in a slot."""

    name: str
    offset: int
    nbytes: int


class Snapshots:
    """One rank's side: takes states, and gives back the newest that can be had for all ranks.

    A rank that has none of its own, since it is new or was elsewhere, has that of a rank that held the same: out of another
    memory of its launcher, or of another machine's. Where a machine alone holds some part, its ranks copy theirs to the next
    machine as well, whose memory has room for such guests.

    Args:
        path: of this rank's memory. state: tensors by name, which are the same ones at every step.
        about: what else must be the same for a state to be taken up again, such as the place among shards.
        others: further memories of the same launcher. guest: the one among them for what another machine's rank copies here.
        machine: a number that ranks of a machine share.
    """

    def __init__(
        self,
        path: str,
        state: Mapping[str, Tensor],
        about: str,
        others: Sequence[str] = (),
        *,
        guest: str | None = None,
        machine: int = 0,
    ) -> None:
        self._places, self._slot_bytes = _places(state)
        digest = hashlib.sha256(about.encode())
        for name, tensor in sorted(state.items()):
            digest.update(f"{name} {tuple(_local(tensor).shape)} {tensor.dtype}\n".encode())
        self._own = _Memory(path, digest.digest(), self._slot_bytes)
        self._others = [other for other in others if other != path]
        self._guest, self._machine = guest, machine
        self._next: Neighbours | None = None
        self._lineage = self._known = 0
        self._found: State = NONE
        self._sources: dict[int, int] = {}
        self._digests: list[bytes] = []

    @property
    def steps(self) -> list[int]:
        """Steps done in the state of each slot of this rank's memory, or EMPTY."""
        return [state.step for state in self._own.states]

    def take(self, done: int, state: Mapping[str, Tensor], world: World) -> None:
        """Copy the state after `done` steps over the older of the two. Collective, if it is copied to another machine as well."""

        def fill(slot: Tensor) -> None:
            for place in self._places:
                tensor = _local(state[place.name])
                _part(slot, place, tensor).copy_(tensor)

        taken = State(self._lineage, done)
        filled = self._own.put(taken, fill)
        if self._guest is not None:
            if self._next is None:
                self._next = Neighbours.find(self._own.digest.hex(), self._slot_bytes, self._machine, world)
            there = self._next
            guest = _Memory(self._guest, bytes.fromhex(there.kind), there.nbytes)
            guest.put(taken, lambda slot: there.exchange(filled, slot))

    def newest(self, world: World) -> int | None:
        """Steps done in the newest state that can be had for all ranks; None if there is none. Collective."""
        found = _inventories([self._own.path, *self._others], self._own.digest, world)
        common = [set().union(*(has.get(mine, ()) for _, has in found)) for mine, _ in found]
        newest = max(set.intersection(*common), default=NONE)
        self._sources = {}
        for rank, (mine, has) in enumerate(found):
            if newest != NONE and newest not in has.get(mine, ()):
                self._sources[rank] = next(
                    r for r, (_, others) in enumerate(found) if newest in others.get(mine, ())
                )
        self._digests, self._found = [mine for mine, _ in found], newest
        self._known = _last_lineage(found)
        return None if newest == NONE else newest.step

    def give_back(self, state: Mapping[str, Tensor], world: World) -> None:
        """Copy the state that `newest` found into tensors; others are forgotten. Collective.

        It is taken at once as the first of a new lineage: memories of machines that are away, and of guests, may have steps after
        it, of other micro-batches or kernels, which must not be mixed with those to come.
        """
        for rank, source in self._sources.items():  # in the same order on all
            if source == world.rank:
                send(self._find(self._digests[rank]), rank, world)
        slot = (
            receive(self._slot_bytes, self._sources[world.rank], world)
            if world.rank in self._sources
            else self._find(self._own.digest)
        )
        for place in self._places:
            tensor = _local(state[place.name])
            tensor.copy_(_part(slot, place, tensor))
        world.barrier("state in memory is read")  # from here on memories may be written into
        self._own.keep(self._found)
        self._lineage = _next_lineage(self._known)
        self.take(self._found.step, state, world)

    def forget(self, world: World) -> None:
        """Give back nothing any more: the run goes on from elsewhere. Collective."""
        found = _inventories([self._own.path, *self._others], self._own.digest, world)
        self._lineage = _next_lineage(max(self._lineage, _last_lineage(found)))
        self._own.keep(NONE)

    def _find(self, digest: bytes) -> Tensor:
        """The slot of some memory here that has the state that was found."""
        for path in (self._own.path, *self._others):
            said, slot_bytes, states = _header(path)
            if said == digest and self._found in states:
                return _Memory(path, digest, slot_bytes).slot(states.index(self._found))
        raise ValueError(f"the state after step {self._found.step} is not in memory any more")


class _Memory:
    """Two slots for states of one kind, in memory that a launcher holds."""

    def __init__(self, path: str, digest: bytes, slot_bytes: int) -> None:
        self.path, self.digest, self.slot_bytes = path, digest, slot_bytes
        self._bytes: Tensor | None = None

    @property
    def states(self) -> list[State]:
        """What each slot has, or NONE."""
        said, _, states = _header(self.path)
        return states if said == self.digest else [NONE] * SLOTS

    def slot(self, number: int) -> Tensor:
        start = _HEADER_BYTES + number * self.slot_bytes
        return self._all()[start : start + self.slot_bytes]

    def put(self, taken: State, fill: Callable[[Tensor], None]) -> Tensor:
        """Fill the slot of the older state; returns it."""
        states = self.states
        number = states.index(min(states))
        states[number] = NONE
        self._write(states)  # a kill from here on finds the other one whole
        fill(self.slot(number))
        states[number] = taken
        self._write(states)
        return self.slot(number)

    def keep(self, one: State) -> None:
        """Hold states of this kind from now on; of those that are there, only one."""
        self._write([state if state == one else NONE for state in self.states])

    def _all(self) -> Tensor:
        if self._bytes is None:
            self._bytes = opened(self.path, _HEADER_BYTES + SLOTS * self.slot_bytes)
        return self._bytes

    def _write(self, states: list[State]) -> None:
        header = self._all()[:_HEADER_BYTES].numpy().data
        _HEADER.pack_into(header, 0, self.digest, self.slot_bytes, *chain(*states))


def _part(slot: Tensor, place: Place, like: Tensor) -> Tensor:
    """The copy of a tensor that a slot has, of its type and shape."""
    return slot[place.offset : place.offset + place.nbytes].view(like.dtype).view(like.shape)


def _header(path: str) -> tuple[bytes, int, list[State]]:
    """Digest, bytes of a slot and states of a memory; of a new one, those of nothing."""
    with Path(path).open("rb") as file:
        raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        return b"", 0, [NONE] * SLOTS
    digest, slot_bytes, *numbers = _HEADER.unpack(raw)
    return digest, slot_bytes, [State(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def _last_lineage(found: Sequence[tuple[bytes, Mapping[bytes, set[State]]]]) -> int:
    return max((state.lineage for _, has in found for states in has.values() for state in states), default=0)


def _next_lineage(known: int) -> int:
    """One that no world has drawn: an epoch is one world's alone."""
    return max(known, int(os.environ.get(EPOCH, "0")) * LINEAGES) + 1


def _inventories(
    paths: Sequence[str], mine: bytes, world: World
) -> list[tuple[bytes, dict[bytes, set[State]]]]:
    """Of each rank: the kind of state that it needs, and which states its memories have. Collective."""
    has: dict[str, list[State]] = {}
    for path in paths:
        digest, _, states = _header(path)
        has.setdefault(digest.hex(), []).extend(state for state in states if state != NONE)
    found = []
    for text in tell_all(json.dumps([mine.hex(), has]), world):
        needs, there = json.loads(text)
        states_of = {bytes.fromhex(kind): {State(*pair) for pair in pairs} for kind, pairs in there.items()}
        found.append((bytes.fromhex(needs), states_of))
    return found


def _among_replicas(plan: Plan, rank: int) -> tuple[int, ...]:
    """The place of a rank on all axes but replicate: ranks with the same one hold the same state."""
    return tuple(place for axis, place in plan.coordinates(rank).items() if axis != "replicate")


def lost_with_one(plan: Plan, firsts: Sequence[int]) -> bool:
    """Whether some part of the state is on one of several machines alone, all of which have as many ranks.

    Args:
        firsts: the number of the first rank of each machine.

    Example:
        >>> from shoal.plan import Plan
        >>> lost_with_one(Plan(shard=4), [0, 2]), lost_with_one(Plan(replicate=2, shard=2), [0, 2])
        (True, False)
    """
    each, left = divmod(plan.world_size, len(firsts))
    if len(firsts) == 1 or left or list(firsts) != [*range(0, plan.world_size, each)]:
        return False
    where: dict[tuple[int, ...], set[int]] = {}
    for rank in range(plan.world_size):
        where.setdefault(_among_replicas(plan, rank), set()).add(rank // each)
    return any(len(machines) == 1 for machines in where.values())


def kept_for(plan: Plan, rank: int) -> str:
    """What must be the same for a rank to take a state up again: how it is cut, and which part of it this rank has."""
    cut = plan.model_dump(include={"pipeline", "shard", "context", "tensor", "expert", "virtual_stages"})
    return f"{cut}, ZeRO-{plan.zero_stage}, {plan.stages_per_rank} stages, part {_among_replicas(plan, rank)}"


def is_something_kept() -> bool:
    """Whether this launcher's memory holds any state, of whatever rank."""
    paths = os.environ.get(KEPT)
    if paths is None:
        return False
    return any(state != NONE for path in Kept(*json.loads(paths)).all for state in _header(path)[2])


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
    kept = Kept(*json.loads(paths))
    return Snapshots(kept.own, state(), about, kept.all, guest=kept.guest, machine=kept.machine)


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
