"""What sharding sends goes by copy engines: GPUs of a host read and write each other's memory, and computing keeps its own.

NCCL's kernels share multiprocessors with what computes, and beside it move less than half of what the link could: the figures are
in benchmarks/notes.md. Here nothing but `Region.meet` runs on a multiprocessor, which waits until all ranks have come.

[Note: the order of things] All ranks of a group use their regions alike: write, meet, read, meet. After the first meeting all
have written, after the second all have read, so that it can be written again. All this is in the order of one stream.

Numbers are those of `gather_many` and of an exchange by NCCL, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.parallel.sums import BLOCK, blocks_of, sum_parts

ROOM = 128 << 20  # bytes of a region that many tensors go through
LARGE = 1 << 20  # bytes from which a copy is one of its own, which the device's copy engines do
LINE = 512  # bytes to which parts of a region are aligned


class Region(NamedTuple):
    """A piece of this rank's memory, equally long on all ranks of a group, that all of them can write and read."""

    rank: int
    ranks: int
    tensor: Callable[[int, int, int, torch.dtype], Tensor]
    """of a rank, from a byte on, so many elements of a type; with a storage of its own, which begins there"""
    meet: Callable[[], None]
    """returns, or on a GPU lets its stream go on, when all ranks have come; what they wrote before is then seen"""
    memory: Any = None
    """what has to be held for as long as tensors of it are used"""

    @property
    def others(self) -> list[int]:
        """All other ranks, beginning with the one after this, so that not all ask the same one first."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]


class Cut(NamedTuple):
    """A part of one of several tensors, in bytes (or elements) of it, and its place within a room."""

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
    whole = free = room // unit * unit
    for number, length in enumerate(lengths):
        begin = 0
        while begin < length:
            if not pieces or free < unit:
                pieces.append([])
                free = whole
            end = min(length, begin + free)
            pieces[-1].append(Cut(number, begin, end, whole - free))
            free -= -(-(end - begin) // unit) * unit
            begin = end
    return pieces


class Peers:
    """The ranks of a group, by whose memory this one gathers and exchanges.

    Args:
        lend: makes a region of so many bytes; collective over the group.
        note: told what is about to be done, as collectives are.
        room: bytes of a region that many tensors go through.
    """

    def __init__(
        self,
        ranks: int,
        lend: Callable[[int], Region],
        note: Callable[[str], None] = lambda text: None,
        room: int = ROOM,
    ) -> None:
        self._ranks, self._lend_more, self._note, self._room = ranks, lend, note, room
        self.nbytes = 0
        """of this rank that is lent: torch's allocator does not know of it"""
        self._gathers: Room | None = None
        self._exchanges: Room | None = None

    @torch.no_grad()
    def gather(self, outputs: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Each output, one-dimensional, becomes all ranks' parts; this rank's are in `places`, within outputs. Collective."""
        self._note(_text("gather", outputs))
        if self._gathers is None:
            self._gathers = Room(self._lend(self._room), self._room)
        self._gathers.gather(outputs, places)

    @torch.no_grad()
    def sum_parts(self, parts: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """Each of `parts` becomes the sum of all ranks' gradients there; returns the sum of their squares. Collective."""
        self._note(_text("exchange", gradients))
        if self._exchanges is None:
            self._exchanges = Room(self._lend(self._room), self._room)
        return self._exchanges.sum_parts(parts, gradients)

    def share(self, numels: Sequence[int], kinds: Sequence[torch.dtype]) -> Shared:
        """Memory of tensors that are gathered again and again, of which each rank has so many elements. Collective."""
        return Shared(self._ranks, self._lend, self._note, list(zip(numels, kinds, strict=True)))

    def _lend(self, nbytes: int) -> Region:
        self.nbytes += nbytes
        return self._lend_more(nbytes)


class Room:
    """A region that tensors go through piece by piece."""

    def __init__(self, region: Region, room: int) -> None:
        self._region, self._room, self._stream = region, room, None
        self._of = [region.tensor(rank, 0, room, torch.uint8) for rank in range(region.ranks)]

    def gather(self, outputs: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """See `Peers`."""
        self._take_turn()
        wholes, parts = [_bytes(output) for output in outputs], [_bytes(place) for place in places]
        for piece in cuts(tuple(part.numel() for part in parts), self._room, LINE):
            mine = [parts[cut.tensor].narrow(0, cut.begin, cut.length) for cut in piece]
            copy_all(self._held(self._region.rank, piece), mine)
            self._region.meet()
            for rank in self._region.others:
                starts = [rank * parts[cut.tensor].numel() + cut.begin for cut in piece]
                theirs = [
                    wholes[cut.tensor].narrow(0, start, cut.length)
                    for cut, start in zip(piece, starts, strict=True)
                ]
                copy_all(theirs, self._held(rank, piece))
            self._region.meet()

    def sum_parts(self, parts: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """See `Peers`."""
        self._take_turn()
        rank, kind = self._region.rank, gradients[0].dtype
        rows = self._region.ranks - 1  # of what comes from others
        lengths = tuple(part.numel() for part in parts)
        counts = [blocks_of(length) for length in lengths]
        squares = torch.empty(sum(counts), dtype=torch.float32, device=parts[0].device)
        of_parts = squares.split(counts)
        of_ranks = [gradient.view(self._region.ranks, -1) for gradient in gradients]
        regions = [region.view(kind) for region in self._of]
        for piece in cuts(lengths, self._room // kind.itemsize // rows, BLOCK):
            for other in self._region.others:
                row = rank - (rank > other)
                copy_all(
                    [regions[other].narrow(0, rows * cut.at + row * cut.length, cut.length) for cut in piece],
                    [of_ranks[cut.tensor][other].narrow(0, cut.begin, cut.length) for cut in piece],
                )
            self._region.meet()
            for cut in piece:
                sum_parts(
                    of_ranks[cut.tensor][rank].narrow(0, cut.begin, cut.length),
                    regions[rank].narrow(0, rows * cut.at, rows * cut.length),
                    parts[cut.tensor].narrow(0, cut.begin, cut.length),
                    of_parts[cut.tensor].narrow(0, cut.begin // BLOCK, blocks_of(cut.length)),
                )
            self._region.meet()
        return squares.sum()

    def _held(self, rank: int, piece: Sequence[Cut]) -> list[Tensor]:
        return [self._of[rank].narrow(0, cut.at, cut.length) for cut in piece]

    def _take_turn(self) -> None:
        """Come after what was done here on another stream: roots of a pipeline's stages have streams of their own."""
        if not self._of[0].is_cuda:
            return
        stream: Any = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


class Shared:
    """Gathered tensors in memory that all ranks of a group read: each rank writes its part of each, and copies those of others.

    Args:
        parts: of each tensor the elements of a rank, and the type.
    """

    def __init__(
        self,
        ranks: int,
        lend: Callable[[int], Region],
        note: Callable[[str], None],
        parts: Sequence[tuple[int, torch.dtype]],
    ) -> None:
        begins, self.nbytes = list[int](), 0
        for numel, kind in parts:
            begins.append(self.nbytes)
            self.nbytes += -(-ranks * numel * kind.itemsize // LINE) * LINE
        self._region = region = lend(self.nbytes)
        every = [
            [
                region.tensor(rank, at, ranks * numel, kind)
                for at, (numel, kind) in zip(begins, parts, strict=True)
            ]
            for rank in range(ranks)
        ]
        self.tensors = every[region.rank]
        """one-dimensional, of all ranks' parts"""
        self._copies = [
            (
                [whole.view(ranks, -1)[rank] for whole in self.tensors],
                [whole.view(ranks, -1)[rank] for whole in every[rank]],
            )
            for rank in region.others
        ]
        self._tell = partial(note, _text("gather", self.tensors))

    def wait_to_write(self) -> None:
        """Come after all ranks' last gathers: this rank's parts may then be written. Collective."""
        self._region.meet()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the parts of all other ranks, which they have written. Collective."""
        self._tell()
        self._region.meet()
        for own, theirs in self._copies:
            copy_all(own, theirs)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Large ones by copy engines, which take long to begin; small ones together by one kernel."""
    small: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes >= LARGE:
            target.copy_(source, non_blocking=True)
        else:
            small.append((target, source))
    if small:
        torch._foreach_copy_([target for target, _ in small], [source for _, source in small])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _text(what: str, tensors: Sequence[Tensor]) -> str:
    """Of a call, what must be equal on all ranks."""
    kind = str(tensors[0].dtype).removeprefix("torch.")
    return f"{what} by copies {kind} ({sum(tensor.numel() for tensor in tensors)},)"
