"""What sharding sends goes by copy engines: GPUs of a host read and write each other's memory, and computing keeps its own.

NCCL's kernels share multiprocessors with what computes, and beside it move less than half of what the link could: the figures are
in benchmarks/notes.md. Here nothing but `Region.meet` runs on a multiprocessor, which waits until all ranks have come.

[Note: the order of things] Each rank has one region, which all use alike: write, meet, read, meet. After the first meeting all
have written, after the second all have read, so that it can be written again. All this is in the order of one stream.

Numbers are those of `gather_many` and of an exchange by NCCL, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.observe.calls import Group
from shoal.parallel.sums import BLOCK, blocks_of, sum_parts
from shoal.simulated import is_simulated
from shoal.world import World

ROOM = 128 << 20  # bytes of a region
LARGE = 1 << 20  # bytes from which a copy is one of its own, which the device's copy engines do
LINE = 512  # bytes to which parts of a region are aligned
LEAST_RATE = 100e9
"""bytes a second at which ranks must read each other's memory: NVLink does; over PCIe NCCL has better ways"""


class Region(NamedTuple):
    """A piece of this rank's memory, equally long on all ranks of a group, that all of them can write and read."""

    rank: int
    of: Sequence[Tensor]
    """(bytes,) of each rank, this one's too"""
    meet: Callable[[], None]
    """returns, or on a GPU lets its stream go on, when all ranks have come; what they wrote before is then seen"""


class Cut(NamedTuple):
    """A part of one of several tensors, in bytes (or elements) of it, and its place within a region."""

    tensor: int
    begin: int
    end: int
    at: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@lru_cache(4096)
def cuts(lengths: tuple[int, ...], room: int, unit: int) -> list[list[Cut]]:
    """Tensors of these lengths in pieces that fit into `room`; parts begin at multiples of `unit`, in tensors and in the room.

    Example:
        >>> [[tuple(cut) for cut in piece] for piece in cuts((3, 10), 8, 2)]
        [[(0, 0, 3, 0), (1, 0, 4, 4)], [(1, 4, 10, 0)]]
    """
    pieces: list[list[Cut]] = []
    free = 0
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            if free < unit:
                pieces.append([])
                free = room // unit * unit
            end = min(length, begin + free)
            pieces[-1].append(Cut(number, begin, end, room // unit * unit - free))
            free -= -(-(end - begin) // unit) * unit
            begin = end
    return pieces


class Peers:
    """Gathers and exchanges by the memory of a group's ranks.

    Args:
        note: told what is about to be done, as collectives are.
    """

    def __init__(self, region: Region, note: Callable[[str], None] = lambda text: None) -> None:
        self._region, self._note = region, note
        self._room = region.of[0].numel()
        self._stream: Any = None

    @property
    def _others(self) -> Iterator[int]:
        """All other ranks, each rank beginning with the one after it, so that they do not all ask the same one."""
        ranks = len(self._region.of)
        return ((self._region.rank + step) % ranks for step in range(1, ranks))

    @torch.no_grad()
    def gather(self, outputs: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Each output, one-dimensional, becomes all ranks' parts; this rank's are in `places`, within outputs. Collective."""
        self._note(_text("gather", outputs))
        self._take_turn()
        wholes, parts = [_bytes(output) for output in outputs], [_bytes(place) for place in places]
        own = self._region.of[self._region.rank]
        for piece in cuts(tuple(part.numel() for part in parts), self._room, LINE):
            mine = [parts[cut.tensor][cut.begin : cut.end] for cut in piece]
            _copy([own.narrow(0, cut.at, cut.length) for cut in piece], mine)
            self._region.meet()
            for rank in self._others:
                theirs = self._region.of[rank]
                starts = [rank * parts[cut.tensor].numel() + cut.begin for cut in piece]
                _copy(
                    [
                        wholes[cut.tensor].narrow(0, start, cut.length)
                        for cut, start in zip(piece, starts, strict=True)
                    ],
                    [theirs.narrow(0, cut.at, cut.length) for cut in piece],
                )
            self._region.meet()

    @torch.no_grad()
    def sum_parts(self, parts: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """Each of `parts` becomes the sum of all ranks' gradients there; returns the sum of their squares. Collective."""
        self._note(_text("exchange", gradients))
        self._take_turn()
        rank, others = self._region.rank, len(self._region.of) - 1
        kind = gradients[0].dtype
        lengths = tuple(part.numel() for part in parts)
        counts = [blocks_of(length) for length in lengths]
        squares = torch.empty(sum(counts), dtype=torch.float32, device=parts[0].device)
        of_parts = squares.split(counts)
        regions = [region.view(kind) for region in self._region.of]
        for piece in cuts(lengths, self._room // kind.itemsize // others, BLOCK):
            for other in self._others:
                row = rank - (rank > other)  # of this rank among those that send to the other
                _copy(
                    [
                        regions[other].narrow(0, others * cut.at + row * cut.length, cut.length)
                        for cut in piece
                    ],
                    [
                        gradients[cut.tensor].narrow(0, other * lengths[cut.tensor] + cut.begin, cut.length)
                        for cut in piece
                    ],
                )
            self._region.meet()
            for cut in piece:
                sum_parts(
                    gradients[cut.tensor].narrow(0, rank * lengths[cut.tensor] + cut.begin, cut.length),
                    regions[rank].narrow(0, others * cut.at, others * cut.length),
                    parts[cut.tensor].narrow(0, cut.begin, cut.length),
                    of_parts[cut.tensor].narrow(0, cut.begin // BLOCK, blocks_of(cut.length)),
                )
            self._region.meet()
        return squares.sum()

    def _take_turn(self) -> None:
        """Come after what was done with the region on another stream: roots of a pipeline's stages have streams of their own."""
        if not self._region.of[0].is_cuda:
            return
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def find_peers(group: dist.ProcessGroup, world: World, wanted: bool | None) -> tuple[Peers, Peers] | None:
    """For gathers and for exchanges, in a group whose ranks reach each other's memory fast, or None. Collective over the group.

    Args:
        wanted: None: where it can be; False: not at all; True: or else an error.

    Raises:
        ValueError: it is wanted, and cannot be; the message says why, on all ranks of the group.
    """
    if wanted is False or is_simulated() or group.size() == 1:
        return None
    found = _find(group, world)
    if isinstance(found, str):
        if wanted:
            raise ValueError(f"plan.copy_engines: {found}; leave it out")
        return None
    name, kind = group.group_name, group.group_desc.removeprefix("mesh_")
    here = Group(name, kind, tuple(dist.get_process_group_ranks(group)))

    def note(text: str) -> None:
        if world.calls is not None:
            world.calls.add(here, text, f"{__file__}:{Peers.gather.__code__.co_firstlineno} in Peers")

    return Peers(found, note), Peers(_region(group, world.device), note)


def _find(group: dist.ProcessGroup, world: World) -> Region | str:
    """A region, or why there is none; all ranks of the group find the same."""
    if world.device.type != "cuda" or torch.version.hip is not None:
        return "it is for NVIDIA GPUs"
    if world.compares_calls:
        return "ranks compare with each other what they call, and copies are not called"
    if not world.is_one_host(group):
        return "it is for GPUs of one host, and ranks that cut the model are on several"
    region = None
    with suppress(RuntimeError):
        region = _region(group, world.device)
    if not _all_have(region is not None, group, world):
        return "the driver does not let processes share memory of their GPUs"
    rate = _rate(cast(Region, region))
    if not _all_have(rate >= LEAST_RATE, group, world):
        return (
            f"one GPU of this host reads another one's memory at {rate / 1e9:.0f} GB/s, where NCCL is as fast"
        )
    return cast(Region, region)


def _region(group: dist.ProcessGroup, device: torch.device) -> Region:
    """Torch documents this module, under its private name alone (pytorch, docs/source/symmetric_memory.md). Collective."""
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(ROOM, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)
    of = [
        own if rank == group.rank() else handle.get_buffer(rank, (ROOM,), torch.uint8)
        for rank in range(group.size())
    ]
    return Region(group.rank(), of, handle.barrier)


def _rate(region: Region) -> float:
    """Bytes a second from the next rank's memory, while all ranks read; the best of some."""
    half = ROOM // 2
    target = torch.empty(half, dtype=torch.uint8, device=region.of[0].device)
    source = region.of[(region.rank + 1) % len(region.of)][:half]
    best = math.inf
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        region.meet()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return half / best


def _all_have(own: bool, group: dist.ProcessGroup, world: World) -> bool:
    agreed = torch.tensor(float(own), device=world.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Large ones by copy engines, which take long to begin; small ones together by one kernel."""
    small: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes >= LARGE:
            target.copy_(source, non_blocking=True)
        else:
            small.append((target, source))
    if small:
        torch._foreach_copy_([target for target, _ in small], [source for _, source in small])


def _text(what: str, tensors: Sequence[Tensor]) -> str:
    """Of a call, what must be equal on all ranks."""
    kind = str(tensors[0].dtype).removeprefix("torch.")
    return f"{what} by copies {kind} ({sum(tensor.numel() for tensor in tensors)},)"
