"""`Passing`: a state on its way from a device to host memory, by copies that a stream is asked for in groups.

[Note: copies on their way] A stream takes 1,020 copies or kernels; who asks for another waits until one is done. Of an 8B model
one rank of two had 1,343 copies and waited for 0.3 s, and the other for it. So a rank asks for 512, and a thread for the rest as
those get done: for each group by one call, since a call for each copy takes the interpreter from the rank every time.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

ALL = 1 << 62
SURELY = 0.9  # of the bytes that passed before an update: another time it may come sooner
GROUP = 256  # copies
AT_ONCE = 2  # groups
Pair = tuple[Tensor, Tensor]
"""a place in host memory, and what is copied there"""


class Passing:
    """Copies to host memory that have been asked for or will be, and when they are made by the clock of their stream."""

    def __init__(self) -> None:
        self.update: torch.cuda.Event | None = None
        """when the first update after it was due"""
        self.released = torch.cuda.Event(enable_timing=True)
        """from here on an update may write"""
        self.copied = torch.cuda.Event(enable_timing=True, blocking=True)
        """from here on all is in host memory"""
        self.asked_for = threading.Event()
        """what lies before `released` is on its way, or never will be"""
        self._began = torch.cuda.Event(enable_timing=True)
        self._pairs: list[Pair] = []
        self._held: list[Tensor] = []
        self._direct = self._asked = self._nbytes = 0
        self._marks: list[torch.cuda.Event] = []

    def ask(self, direct: list[Pair], aside: list[Pair], held: list[Tensor]) -> None:
        """Ask the stream that is current for as many copies as it takes without holding the host up.

        Args:
            direct: which the update changes. aside: which it does not.
            held: what else has to stay until all is copied: memory that other streams take again when nobody holds it.
        """
        self._held = held
        self._began.record()
        self._pairs, self._direct = direct + aside, len(direct)
        self._nbytes = sum(place.nbytes for place, _ in self._pairs)
        self._note()
        for _ in range(AT_ONCE):
            self._ask_for_group()

    def ask_for_rest(self) -> None:
        """Ask for the others, in a thread, as copies get done; and keep what is read until all are."""
        while self._asked < len(self._pairs):
            self._marks[-2].synchronize()
            self._ask_for_group()
        self.copied.synchronize()
        self._pairs, self._held = [], []

    def _ask_for_group(self) -> None:
        first, end = self._asked, min(self._asked + GROUP, len(self._pairs))
        if first < self._direct:
            end = min(end, self._direct)
        if first == end:
            return
        places, sources = zip(*self._pairs[first:end], strict=True)
        torch._foreach_copy_(places, sources, non_blocking=True)
        self._asked = end
        mark = torch.cuda.Event(blocking=True)
        mark.record()
        self._marks.append(mark)
        self._note()

    def _note(self) -> None:
        if self._asked == self._direct and not self.asked_for.is_set():
            self.released.record()
            self.asked_for.set()
        if self._asked == len(self._pairs):
            self.copied.record()

    @property
    def _has_come(self) -> bool:
        """Whether there was an update before all was copied: one that comes later is not held up."""
        return self.update is not None and self.update.query()

    @property
    def late_s(self) -> float:
        """For how long the update waited."""
        if self.update is None or not self._has_come:
            return 0.0
        return max(0.0, self.update.elapsed_time(self.released) / 1000)

    @property
    def in_time(self) -> int:
        """Bytes that pass before an update comes, with something to spare."""
        if self.update is None or not self._has_come:
            return ALL
        until_s = self._began.elapsed_time(self.update) / 1000
        return passes_in(until_s, self._began.elapsed_time(self.copied) / 1000, self._nbytes)


def passes_in(until_s: float, all_s: float, nbytes: int) -> int:
    """Bytes that surely pass until an update comes, of so many that took `all_s` to pass.

    Example:
        >>> passes_in(0.5, 2.0, 1000)
        225
    """
    return int(SURELY * until_s / all_s * nbytes) if all_s > 0 else ALL
