"""`Copies`: what a rank hands over, in memory of who writes it, and how it gets there while the rank goes on.

[Note: copies beside the next step] On a GPU copies run on a stream of their own. Nothing but the update, and the forward pass for
buffers, writes into what is copied: the update's stream waits for the copies (`before_update`), and buffers are copied on the
device first. A thread waits for the last copy and rings. On a CPU the copy is made at once. To make the memory and lock it takes
0.4 s a gigabyte: a thread does that beside the first steps (`Making`), piece by piece, since CUDA takes no launch meanwhile; but
not where steps are recorded, which is refused while another thread asks for memory.

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
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from shoal.checkpoint.layout import HEADER_BYTES
from shoal.checkpoint.write import item_bytes
from shoal.parallel.host import PIECE, Pause, lock_in_pieces
from shoal.resilience.aside import Aside, sizes_of
from shoal.resilience.passing import Pair, Passing
from shoal.resilience.saver import Handed
from shoal.resilience.snapshot import opened


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
        self._passing: Passing | None = None
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
            resolved = zip(self._items, self._resolve(state), strict=True)
            sources = [_steady(item, data) for item, data in resolved]
            if not self.on_gpu:
                self._copy_from_host(sources)
                then(time.monotonic() - began)
                return
            before = torch.cuda.Event()
            before.record()
            passing = Passing()
            with self._aside.lane.run():
                nbytes = sum(sizes_of(sources))
                aside = self._aside.take(sources, nbytes - self._in_time) if nbytes > self._in_time else {}
                direct, later = list[Pair](), list[Pair]()
                for number, source in enumerate(sources):
                    if source.is_cuda:
                        pairs = self._pairs_of(number, aside.get(number, source))
                        (later if number in aside else direct).extend(pairs)
                passing.ask(direct, later, sources)
            self._copy_from_host(sources)
        held_up_s = time.monotonic() - began
        if not before.query():  # the device had the step before to do all the while
            held_up_s = 0.0
        self._passing = passing
        self._thread = threading.Thread(
            target=self._when_copied, args=(passing, then, held_up_s), daemon=True
        )
        self._thread.start()

    def before_update(self) -> None:
        passing = self._passing
        if passing is not None and passing.update is None:
            update = torch.cuda.Event(enable_timing=True)
            update.record()
            passing.update = update
            passing.asked_for.wait()  # the device still has the step to do
            passing.released.wait()

    def join(self) -> None:
        """Wait until the copies are there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _place_of(self, number: int, nbytes: int) -> Tensor:
        return self._memory[self._begins[number] : self._begins[number] + nbytes]

    def _pairs_of(self, number: int, source: Tensor) -> list[Pair]:
        """What is copied where, of an item of the device."""
        if not source.nbytes:
            return []
        place = self._place_of(number, source.nbytes)
        pieces = list(in_pieces(place, self._begins[number]))
        if len(pieces) == 1 and not source.is_contiguous():  # made so when it is copied, and kept no longer
            return [(place.view(source.dtype).view(source.shape), source)]
        # strides of dims of one element may be anything, and then it cannot be seen as bytes
        read = source.contiguous().as_strided((source.numel(),), (1,)).view(torch.uint8)
        return [(part, read[begin : begin + len(part)]) for part, begin in pieces]

    def _copy_from_host(self, sources: list[Tensor]) -> None:
        """The items that are in host memory."""
        for number, source in enumerate(sources):
            if source.nbytes and not source.is_cuda:
                self._place_of(number, source.nbytes).view(source.dtype).view(source.shape).copy_(source)

    def _when_copied(self, passing: Passing, then: Callable[[float], None], held_up_s: float) -> None:
        try:
            # a thread begins with the first device, and leaving a stream would go back there, which takes some of its memory
            torch.cuda.set_device(self._device)
            with torch.no_grad(), self._aside.lane.on():
                passing.ask_for_rest()
            self._aside.let_go()
            self._in_time = passing.in_time
            then(held_up_s + passing.late_s)
        except Exception as error:  # of the device; told by who waits
            self._error = error
        finally:
            passing.asked_for.set()


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
