"""`Aside`: copies on the device of what is saved and would not pass to host memory before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from shoal.parallel.host import Lane

SPARE = 0.05  # of a device's memory, which is left free
WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""types by which tensors of so many bytes an element are copied: many at once only where all are of one"""
LARGE = 1 << 24
"""elements: torch 2.11 copies 21 million by one launch where it copies many tensors, and any number of one"""


class Aside:
    """The device's memory for copies, as far as steps leave it; made once, since torch keeps its cache by streams.

    [Note: room for copies] A device stands still while torch asks it for memory, 11 ms a gigabyte on an H200, and those of a host
    get theirs one after the other. So torch's cache gets it once, when steps have had theirs: before, it would have to be guessed
    how much they leave, and where the guess is high torch gives all of it back in the first step. It does so by itself as well if
    steps come to need more: then none of it counts as kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lane = Lane(device)
        """on which copies are made, and pass to host memory"""
        self.copies: list[Tensor] = []
        """that have not passed yet"""
        self._needed = 0  # bytes of the device's memory that steps have had
        self._kept = 0  # beside them, bytes of torch's cache
        self._freed = 0  # bytes that torch had given back to the device by then

    def keep_room(self, sizes: Sequence[int]) -> None:
        """Have torch's cache get what copies of so many bytes each need, as far as steps, which have had theirs, leave it."""
        if self._device.type != "cuda":
            return
        self._note_needs()
        chosen = set_aside(sizes, sum(sizes), self._room())
        held: list[Tensor] = []
        with suppress(RuntimeError), self.lane.run():  # what cannot be had now may be there when it is needed
            held.extend(
                torch.empty(sizes[number], dtype=torch.uint8, device=self._device) for number in chosen
            )
        self._keeps(sum(map(len, held)))

    def take(self, sources: Sequence[Tensor], late: int) -> dict[int, Tensor]:
        """Copies of the last ones, `late` bytes or more, as far as there is room, by their numbers; on the lane."""
        self._note_needs()
        sizes = sizes_of(sources)
        try:
            chosen = set_aside(sizes, late, self._room())
            made = [
                torch.empty_like(sources[number], memory_format=torch.contiguous_format) for number in chosen
            ]
        except torch.OutOfMemoryError:
            return {}
        _copy_all(made, [sources[number] for number in chosen])
        found = dict(zip(chosen, made, strict=True))
        kept = self._kept if self._freed == self._freed_now() else 0
        self._keeps(max(kept, sum(sizes[number] for number in found)))
        self.copies = list(found.values())
        return found

    def let_go(self) -> None:
        """All copies have passed: torch's cache has their memory."""
        kept = self._kept if self._freed == self._freed_now() else 0
        self._keeps(max(kept, sum(copy.nbytes for copy in self.copies)))
        self.copies = []

    def _note_needs(self) -> None:
        if self._kept and self._freed != self._freed_now():
            # the peak has what was kept, and steps have had it since
            needed = torch.cuda.memory_reserved(self._device)
        else:
            needed = torch.cuda.max_memory_reserved(self._device) - self._kept
        self._needed = max(self._needed, needed)

    def _keeps(self, nbytes: int) -> None:
        self._kept, self._freed = nbytes, self._freed_now()

    def _freed_now(self) -> int:
        return torch.cuda.memory_stats(self._device).get("reserved_bytes.all.freed", 0)

    def _room(self) -> int:
        """Bytes of the device that steps leave, torch's cache included, which has what earlier copies were in."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - self._needed - int(SPARE * total)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """By few launches, as far as tensors are contiguous: a stream takes only so many, see [Note: copies on their way]."""
    by_width: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        width = WIDTHS.get(source.element_size())
        if width is None or source.numel() >= LARGE or not source.is_contiguous():
            target.copy_(source)
            continue
        to, of = by_width.setdefault(width, ([], []))
        to.append(target.view(width))
        of.append(source.view(width))
    for to, of in by_width.values():
        torch._foreach_copy_(to, of)


def sizes_of(sources: Sequence[Tensor]) -> list[int]:
    """Bytes of each that pass from a GPU."""
    return [source.nbytes if source.is_cuda else 0 for source in sources]


def set_aside(sizes: Sequence[int], late: int, room: int) -> list[int]:
    """The numbers of those to be copied on the device, the last first: `late` bytes or more, as far as there is room.

    Example:
        >>> set_aside([4, 4, 4, 9], late=6, room=100), set_aside([4, 4, 4, 9], late=6, room=5)
        ([3], [2])
    """
    chosen: list[int] = []
    taken = 0
    for number in reversed(range(len(sizes))):
        if taken >= late:
            break
        if 0 < sizes[number] <= room - taken:
            chosen.append(number)
            taken += sizes[number]
    return chosen
