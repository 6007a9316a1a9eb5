"""Works of a simulated world: what a collective or a message gives to wait for. The fake group's works hold nothing and are done
at once; these hold tensors as real ones do, and let it be known when they are waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

import shoal.parallel.direct as direct
import shoal.parallel.exchange as exchange
import shoal.parallel.expert as expert
from shoal.parallel.peers import ROOM, Peers
from shoal.parallel.sums import blocks_of, sum_parts
from shoal.planner.fake_device import replace
from shoal.planner.launch import Launch
from shoal.planner.tape import Tape
from shoal.world import World

COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip
"""of torch.distributed, those that this torch has: 2.13 gave two of them new names"""
WITHOUT_META = "reduce_scatter_tensor_coalesced_"
"""an operator of which torch has no kernel for tensors without values (pytorch, torch/csrc/distributed/c10d/Ops.cpp)"""


class SimulatedWork:
    """A work that holds what Gloo's sends and receives, until it is not there any more; NCCL's holds nothing of messages."""

    def __init__(
        self,
        work: Any,
        held: Tensor | list[Tensor] | None,
        tape: Tape,
        launches: list[Launch],
    ) -> None:
        self._work, self._held = work, held
        self._tape, self._launches = tape, launches

    def wait(self, *args: Any) -> Any:
        for launch in self._launches:
            self._tape.wait(launch)
        return self._work.wait(*args)

    def is_completed(self) -> bool:
        return True


def simulate_works(undo: ExitStack, tape: Tape, *, holds: bool, reach: bool = False) -> None:
    """Until `undo` is closed, torch's collectives and messages give such works.

    What is sent from one rank to another Gloo's works hold, and some schedules of a pipeline have them until a step's end. NCCL's
    tell the allocator which stream uses it, and let go at once (torch, ProcessGroupNCCL.cpp, `pointToPoint`): so the memory of
    interleaved pipelines comes out as it was measured (benchmarks/results/reality.json), and 2 GiB above it otherwise.

    Args:
        holds: as Gloo's works; exchanges are Gloo's too.
        reach: devices of a host reach each other's memory, see `shoal.parallel.peers`.
    """
    replace(undo, direct, "gather_many", functools.partial(_gathered, tape))
    if reach:
        replace(undo, direct, "find_peers", functools.partial(_find_peers, tape))
    if not holds:
        replace(undo, exchange, "exchange_many", functools.partial(_exchanged, tape))
    replace(undo, expert, "_rows_sent", functools.partial(_waited_for, tape, expert._rows_sent))
    library = torch.library.Library("c10d", "IMPL")
    undo.callback(library._destroy)  # there is no public way to take a kernel back
    library.impl(WITHOUT_META, _done, "Meta")
    for name in ("isend", "irecv"):
        _replace_both(undo, name, _message(getattr(distributed, name), tape, holds=holds))
    for name in (name for name in COLLECTIVES if hasattr(distributed, name)):
        _replace_both(undo, name, _collective(getattr(distributed, name), tape))
    together = dist.batch_isend_irecv

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        held = [operation.tensor for operation in operations] if holds else None
        seen = len(tape.trace.events)
        works = together(operations)
        sent = _since(tape, seen)
        return [
            work if isinstance(work, SimulatedWork) else SimulatedWork(work, held, tape, sent)
            for work in works
        ]

    replace(undo, dist, "batch_isend_irecv", batch)


class SimulatedPeers(Peers):
    """Ranks whose memory is reached. Memory that is lent, which torch's allocator does not have in fact, is here its own."""

    def __init__(self, tape: Tape, group: dist.ProcessGroup) -> None:
        self._tape, self._group = tape, group
        self._rooms: dict[str, Tensor] = {}
        self.nbytes = 0

    def gather(self, outputs: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        self.copies("peer_gather", [*outputs, *places, self._room_for("gather")], _bytes_of(outputs))

    def sum_parts(self, parts: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        self.copies("peer_exchange", [*gradients, self._room_for("exchange")], _bytes_of(gradients))
        counts = [blocks_of(part.numel()) for part in parts]
        squares = torch.empty(sum(counts), dtype=torch.float32, device=parts[0].device)
        for part, gradient, own in zip(parts, gradients, squares.split(counts), strict=True):
            first, others = gradient[: part.numel()], gradient[part.numel() :]
            sum_parts(first, others, part, own)
        return squares.sum()

    def share(self, numels: Sequence[int], kinds: Sequence[torch.dtype]) -> Any:
        return SimulatedShared(self, numels, kinds, self._group.size())

    def copies(self, operator: str, tensors: Sequence[Tensor], nbytes: int) -> None:
        """Something goes by copy engines."""
        self._tape.sends(operator, tensors, nbytes, tuple(dist.get_process_group_ranks(self._group)))

    def _room_for(self, use: str) -> Tensor:
        """What tensors go through on their way, from the first time on."""
        if use not in self._rooms:
            self._rooms[use] = room = torch.empty(ROOM, dtype=torch.uint8, device="cuda")
            number = self._tape.number(room)
            if number is not None:
                self._tape.trace.storages[number].kind = "communication"
        return self._rooms[use]


class SimulatedShared:
    """See `Shared`."""

    def __init__(
        self, peers: SimulatedPeers, numels: Sequence[int], kinds: Sequence[torch.dtype], ranks: int
    ) -> None:
        self._peers = peers
        self.tensors = [
            torch.empty(ranks * numel, dtype=kind, device="cuda")
            for numel, kind in zip(numels, kinds, strict=True)
        ]

    def wait_to_write(self) -> None:
        pass

    def gather(self) -> None:
        self._peers.copies("peer_share", self.tensors, _bytes_of(self.tensors))


def _waited_for(tape: Tape, find: Callable[..., Any], *of_rows: Any) -> Any:
    """The host waits for the numbers of rows that ranks send each other."""
    tape.synchronise()
    return find(*of_rows)


def _find_peers(
    tape: Tape, group: dist.ProcessGroup, world: World, wanted: bool | None
) -> SimulatedPeers | None:
    there = wanted is not False and group.size() > 1 and world.is_one_host(group)
    return SimulatedPeers(tape, group) if there else None


def _gathered(tape: Tape, outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    ranks = tuple(dist.get_process_group_ranks(group))
    tape.sends("all_gather", (*outputs, *inputs), _bytes_of(outputs), ranks)


def _exchanged(
    tape: Tape, received: Sequence[Tensor], whole: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """One launch, as NCCL makes it of many; curves of exchanges are by all that a rank has, its own part included."""
    ranks = tuple(dist.get_process_group_ranks(group))
    tape.sends("all_to_all", (*received, *whole), _bytes_of(whole), ranks)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _done(*_of_collective: Any) -> Any:
    return FakeWork().boxed()


def _replace_both(undo: ExitStack, name: str, value: Any) -> None:
    for owner in (distributed, dist):
        replace(undo, owner, name, value)


def _since(tape: Tape, seen: int) -> list[Launch]:
    """What was sent since then."""
    launches = (event for event in tape.trace.events[seen:] if isinstance(event, Launch))
    return [launch for launch in launches if launch.kind in ("collective", "send", "receive")]


def _message(operation: Callable[..., Any], tape: Tape, *, holds: bool) -> Callable[..., Any]:
    @functools.wraps(operation)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen = len(tape.trace.events)
        work = operation(tensor, *args, **kwargs)
        return (
            None if work is None else SimulatedWork(work, tensor if holds else None, tape, _since(tape, seen))
        )

    return run


def _collective(operation: Callable[..., Any], tape: Tape) -> Callable[..., Any]:
    @functools.wraps(operation)
    def run(*args: Any, **kwargs: Any) -> Any:
        seen = len(tape.trace.events)
        work = operation(*args, **kwargs)
        return None if work is None else SimulatedWork(work, None, tape, _since(tape, seen))

    return run
