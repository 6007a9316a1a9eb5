"""`Copies`: what a rank hands over, in memory of who writes it, and how it gets there while the rank goes on.

[Note: copies beside the next step] On a GPU copies run on a stream of their own. Nothing but the update, and the forward pass for
buffers, writes into what is copied: the update's stream waits for the copies (`before_update`), and buffers are copied on the
device first. A thread asks for the copies, waits for the last and rings; the host never does. On a CPU the copy is made at once.
To make the memory and lock it takes 0.4 s a gigabyte: a thread does that beside the first steps (`Making`), piece by piece, since
CUDA takes no launch meanwhile; but not where steps are recorded, which is refused while another thread asks for memory.

[Note: copies on their way] A stream takes some 1,000 copies; who asks for another waits until one is done. An 8B model is 1,343
of them on one rank of two, which waited for 0.3 s, and the other with it. So the thread asks, and has 512 on their way at most.

[Note: what does not pass in time] There is one step until the next update, and an H200's link to host memory takes 54 GB a second
(`planner/profiles/h200.json`). Of a larger state the rest is copied on the device first, where it has room (`Aside`), and passes
while the step after is taken. How much that is, the save before has shown; the first copies all. Steps may come to need more room
than they did: some stays free.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from shoal.checkpoint.layout import HEADER_BYTES
from shoal.checkpoint.write import item_bytes
from shoal.parallel.host import PIECE, Pause, lock_in_pieces
from shoal.resilience.aside import Aside, sizes_of
from shoal.resilience.saver import Handed
from shoal.resilience.snapshot import opened

ALL = 1 << 62
SURELY = 0.9  # of the bytes that passed before an update: another time it may come sooner


class Copies:
    """The launcher's memory for this rank: what its file will hold, at the same bytes."""

    def __init__(
        self,
        path: str,
        items: list[WriteItem],
        resolve: Callable[[dict[str, Tensor]], list[Tensor]],
        handed: Handed,
        aside: Aside,
        device: torch.device,
        pause: Pause,
    ) -> None:
        """`pause` is called after each piece of memory with the seconds that it took: others use the device meanwhile."""
        self._items, self._resolve, self._device = items, resolve, device
        self.on_gpu = device.type == "cuda"
        self._path, self._handed, self._told = path, handed, b""
        *self._begins, at = accumulate(map(item_bytes, items), initial=HEADER_BYTES)
        self.handed_at = at, 0
        """where what is told lies, and its bytes"""
        _reserve(path, at, pause)
        self._memory = opened(path, at)
        if self.on_gpu:
            # what cannot be is no error: the host waits for each copy into it
            lock_in_pieces(self._memory, self._device, pause)
        self._aside = aside
        self._passing: _Passing | None = None
        self._in_time = 0  # bytes that pass before the next update, as far as is known
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def tell(self, facts: dict[str, Any]) -> None:
        """Put behind the state what there is to know of it; `facts` are rank 0's to say, and may be others at every save."""
        contents = (facts, self._handed.contents[1]) if self._handed.contents is not None else None
        told = json.dumps(self._handed._replace(contents=contents)).encode()
        if told == self._told:
            return
        at, file = self.handed_at[0], os.open(self._path, os.O_RDWR)
        try:
            os.pwrite(file, told, at)
        finally:
            os.close(file)
        self._told, self.handed_at = told, (at, len(told))

    def fill(self, state: dict[str, Tensor], then: Callable[[float], None], began: float) -> None:
        """Copy the state, and call `then` with the seconds that this held the rank up, when it is there."""
        with torch.no_grad():
            found = zip(self._items, self._resolve(state), strict=True)
            sources = [_steady(item, data) for item, data in found]
            if not self.on_gpu:
                self._copy(enumerate(sources))
                then(time.monotonic() - began)
                return
            before = torch.cuda.Event()
            before.record()
            with self._aside.lane.run():
                nbytes = sum(sizes_of(sources))
                passing = _Passing(nbytes)
                aside = self._aside.take(sources, nbytes - self._in_time) if nbytes > self._in_time else {}
        held_up_s = time.monotonic() - began
        if not before.query():  # the device had the step before to do all the while
            held_up_s = 0.0
        self._passing = passing
        self._thread = threading.Thread(
            target=self._pass, args=(passing, sources, aside, then, held_up_s), daemon=True
        )
        self._thread.start()

    def before_update(self) -> None:
        passing = self._passing
        if passing is not None and passing.update is None:
            update = torch.cuda.Event(enable_timing=True)
            update.record()
            passing.asked_for.wait()  # the device still has the step to do
            passing.released.wait()
            passing.update = update

    def join(self) -> None:
        """Wait until the copies are there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _copy(
        self, numbered: Iterable[tuple[int, Tensor]], on_copy: Callable[[], None] = lambda: None
    ) -> None:
        """Ask for copies of items to where they lie; `on_copy` is called after each that a device makes."""
        for number, source in numbered:
            if not (size := source.nbytes):
                continue
            at = self._begins[number]
            place = self._memory[at : at + size]
            if source.is_cuda:
                source = _bytes(source)
                for part, begin in in_pieces(place, at):
                    part.copy_(source[begin : begin + len(part)], non_blocking=True)
                    on_copy()
            else:
                place.view(source.dtype).view(source.shape).copy_(source)

    def _pass(
        self,
        passing: _Passing,
        sources: list[Tensor],
        aside: dict[int, Tensor],
        then: Callable[[float], None],
        held_up_s: float,
    ) -> None:
        """In a thread, which keeps what is read, also by copies on the device, until all has passed."""
        try:
            pace = Pace()
            with torch.no_grad(), self._aside.lane.on():
                direct = (numbered for numbered in enumerate(sources) if numbered[0] not in aside)
                self._copy(direct, pace.step)
                passing.released.record()
                passing.asked_for.set()
                self._copy(aside.items(), pace.step)
                passing.copied.record()
            passing.copied.synchronize()
            self._aside.copies = []
            self._in_time = passing.in_time
            then(held_up_s + passing.late_s)
        except Exception as error:  # of the device; told by who waits
            self._error = error
        finally:
            passing.asked_for.set()


class Pace:
    """Waits, on the host, so that no more than two groups of copies are on their way; see [Note: copies on their way]."""

    def __init__(self, group: int = 256) -> None:
        self._group, self._asked = group, 0
        self._last: torch.cuda.Event | None = None

    def step(self) -> None:
        """There is one more."""
        self._asked += 1
        if self._asked % self._group:
            return
        mark = torch.cuda.Event(blocking=True)
        mark.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = mark


class StoppedError(RuntimeError):
    """Nobody waits for what is being made any more."""


class Making:
    """`Copies` that are being made while the rank goes on."""

    def __init__(self, make: Callable[[Pause], Copies]) -> None:
        self._make = make
        self._made: Copies | None = None
        self._error: Exception | None = None
        self._stopped, self._hurried = False, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> Copies:
        """Without further pauses. Raises what making them raised."""
        self._hurried.set()
        self._thread.join()
        if self._made is None:
            raise self._error or RuntimeError("nothing was made")
        return self._made

    def stop(self) -> None:
        """End it after the piece that it is at."""
        self._stopped = True
        self._hurried.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._made = self._make(self._pause)
        except Exception as error:
            self._error = error

    def _pause(self, seconds: float) -> None:
        self._hurried.wait(seconds)
        if self._stopped:
            raise StoppedError


class _Passing:
    """A state on its way to host memory, by the clock of the stream that copies it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._began = torch.cuda.Event(enable_timing=True)
        self.released = torch.cuda.Event(enable_timing=True)
        """from here on an update may write"""
        self.asked_for = threading.Event()
        """what lies before `released` is on its way, or never will be"""
        self.copied = torch.cuda.Event(enable_timing=True, blocking=True)
        self.update: torch.cuda.Event | None = None
        self._began.record()

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


def in_pieces(place: Tensor, at: int) -> Iterator[tuple[Tensor, int]]:
    """What lies from `at` on of memory that was locked in pieces, cut where these end; and where in `place` each begins.

    Example:
        >>> [(len(part), begin) for part, begin in in_pieces(torch.empty(10 + PIECE, dtype=torch.uint8), PIECE - 4)]
        [(4, 0), (268435456, 4), (6, 268435460)]
    """
    begin = 0
    while begin < len(place):
        end = min(len(place), begin + PIECE - (at + begin) % PIECE)
        yield place[begin:end], begin
        begin = end


def _bytes(source: Tensor) -> Tensor:
    return source.contiguous().view(-1).view(torch.uint8)


def _steady(item: WriteItem, data: Tensor) -> Tensor:
    """What on a device is written into by nothing but the update: if it is by more, a copy."""
    return data.clone() if data.is_cuda and item.index.fqn.startswith("buffer.") else data


def _reserve(path: str, nbytes: int, pause: Pause) -> None:
    """Have the system find all of the memory now: what it lacks is an error here, and a kill where it is first written to."""
    file = os.open(path, os.O_RDWR)
    try:
        for at in range(0, nbytes, PIECE):
            os.posix_fallocate(file, at, min(PIECE, nbytes - at))
            pause(0.0)
    finally:
        os.close(file)
