"""Loader processes that may die or hang: torch's DataLoader, begun again at the micro-batch where it was lost."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.data.prefetch import DataError
from shoal.randomness import random_state_kept

POLL_S = 0.1
START_S = 60.0  # at least, for a process that is forked from a server, which may have to import torch first
SETTLE_S = 0.2
SHUT_DOWN_S = 2.0
MOST_DEATHS = 3  # of processes at one sample, after which the sample is to blame
MOST_RESTARTS = 12  # in a row, with nothing read in between
NOTHING = -1
PID, MARKS, EPOCH, INDEX, WIDTH = range(5)  # a process's cells of the board


class Board:
    """What each loader process is reading, in memory that it shares with its rank."""

    def __init__(self, workers: int) -> None:
        self._cells = multiprocessing.RawArray("q", WIDTH * workers)
        self._workers = workers
        self._mine: int | None = None

    def begin(self, worker: int) -> None:
        """In a loader process: what is marked from now on is this one's."""
        self._mine = worker * WIDTH
        self._cells[self._mine + INDEX] = NOTHING
        self._cells[self._mine + PID] = os.getpid()

    def mark(self, epoch: int, index: int) -> None:
        """Say that a sample is being read; says nothing outside of a loader process."""
        if self._mine is not None:
            self._cells[self._mine + EPOCH] = epoch
            self._cells[self._mine + INDEX] = index
            self._cells[self._mine + MARKS] += 1

    def clear(self) -> None:
        """Say that it has been read."""
        self.mark(0, NOTHING)

    def rows(self) -> list[tuple[int, ...]]:
        """(process id, marks, epoch, index) of each process."""
        cells = self._cells[:]
        return [tuple(cells[at : at + WIDTH]) for at in range(0, len(cells), WIDTH)]


class Casualty(NamedTuple):
    """A loader process that is lost: how, and at which sample (epoch, index), if it read one."""

    pid: int
    how: str
    sample: tuple[int, int] | None

    def accusation(self) -> str:
        """What speaks against the sample at which as many as this one were lost."""
        return f"{MOST_DEATHS} loader processes were lost while they read it; the last {self.how}"


class LoadersLostError(Exception):
    """Some loader processes are lost, and with them what they had read."""

    def __init__(self, casualties: list[Casualty]) -> None:
        super().__init__("; ".join(f"loader process {c.pid} {c.how}" for c in casualties))
        self.casualties = casualties


Make = Callable[[int, Board], DataLoader[Any]]
"""a loader that begins with a micro-batch of the given number"""


def loader_of(
    dataset: Dataset[Any], board: Board, *, workers: int, keys: Iterable[Any] | None = None
) -> DataLoader[Any]:
    """A loader of finished micro-batches, in order."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=functools.partial(_begin_process, board),
        generator=torch.Generator(),  # without one, a loader draws from the global random numbers
    )


def steadily(
    make: Make,
    *,
    workers: int,
    deadline_s: float,
    tell: Callable[[Casualty, int], None],
    blame: Callable[[Casualty], None],
) -> Generator[Any]:
    """What `make(0, ...)` yields; when loader processes are lost, all are replaced, and `make(number, ...)` goes on.

    Args:
        deadline_s: how long a process may be at one sample.
        tell: told of each process that is lost, and how many micro-batches came before.
        blame: told of the last of MOST_DEATHS processes that were lost at one sample; raises, or sees to it that the sample is
            not read again.
    """
    if not workers:
        yield from _in_peace(make(0, Board(0)))
        return
    number, losses = 0, _Losses()
    while True:
        board = Board(workers)
        crew = _Crew(make(number, board), board, deadline_s)
        try:
            for found in crew:
                losses.in_a_row = 0
                yield found
                number += 1
            return
        except LoadersLostError as loss:
            crew.kill()
            for lost in loss.casualties:
                tell(lost, number)
            for lost in losses.culprits(loss):
                blame(lost)
        finally:
            crew.end()


def _in_peace(loader: DataLoader[Any]) -> Generator[Any]:
    """What a loader without processes yields; the trainer's random numbers stay as they are."""
    with random_state_kept():
        iterator = iter(loader)
    while True:
        try:
            with random_state_kept():
                found = next(iterator)
        except StopIteration:
            return
        yield found


class _Losses:
    """Losses of loader processes so far, and what follows from them."""

    def __init__(self) -> None:
        self._deaths: Counter[tuple[int, int]] = Counter()
        self.in_a_row = 0

    def culprits(self, loss: LoadersLostError) -> list[Casualty]:
        """Those of a loss whose sample is to blame.

        Raises:
            DataError: again and again, with nothing read in between.
        """
        self.in_a_row += 1
        samples = [lost.sample for lost in loss.casualties if lost.sample is not None]
        limit = MOST_RESTARTS if samples else MOST_DEATHS
        if self.in_a_row > limit:
            raise DataError(
                f"loader processes were replaced {limit} times in a row, and none of them read a micro-batch: {loss}. If the "
                "kernel killed them for want of memory, try fewer data.workers; data.workers=0 shows what ends them"
            ) from loss
        self._deaths.update(samples)
        return [lost for lost in loss.casualties if lost.sample and self._deaths[lost.sample] >= MOST_DEATHS]


class _Crew:
    """The processes of one loader, watched.

    [Note: a death while the rank trains] torch's SIGCHLD handler raises wherever the main thread is, in the middle of a step
    too. Here it is taken off again, and the processes are asked how they are before and while something is waited for.

    [Note: the thread that takes] What a process has made is taken from it, which waits for ever if it is stopped, or was killed
    half-way through. So a thread takes, one micro-batch whenever it is asked, and is left behind if it never answers. It draws
    no random numbers, and nothing else happens while it takes.
    """

    def __init__(self, loader: DataLoader[Any], board: Board, deadline_s: float) -> None:
        self._board, self._deadline_s = board, deadline_s
        before = set(multiprocessing.active_children())
        with _child_signals_kept(), random_state_kept():
            iterator = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        self._asks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Taken] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_take, args=(iterator, self._asks, self._answers), name="shoal-loaders", daemon=True
        )
        self._thread.start()
        self._is_taking = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._require_alive()
        taken = self._wait()
        if taken.error is None:
            return taken.found
        if isinstance(taken.error, StopIteration | DataError):
            raise taken.error
        self._settle()
        raise LoadersLostError([Casualty(0, f"is lost: {taken.error}", None)]) from taken.error

    def _wait(self) -> _Taken:
        watch = _Watch(self._board, self._deadline_s)
        self._asks.put(True)
        self._is_taking = True
        while True:
            try:
                taken = self._answers.get(timeout=POLL_S)
            except queue.Empty:
                self._require_alive()
                self._require_progress(watch)
                continue
            self._is_taking = False
            return taken

    def _require_alive(self) -> None:
        dead = [process for process in self._processes if process.exitcode not in (None, 0)]
        if dead:
            raise LoadersLostError([self._casualty(process, _how(process)) for process in dead])

    def _settle(self) -> None:
        """A process that dies is seen as a closed connection first, and moments later as dead."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            self._require_alive()
            time.sleep(SETTLE_S / 20)

    def _require_progress(self, watch: _Watch) -> None:
        if stuck := watch.stuck():
            how = f"made no progress for {self._deadline_s:g} s (data.deadline_s)"
            hung = [process for process in self._processes if process.pid in stuck]
            raise LoadersLostError([self._casualty(process, how) for process in hung])

    def _casualty(self, process: BaseProcess, how: str) -> Casualty:
        rows = [row for row in self._board.rows() if row[PID] == process.pid and row[INDEX] != NOTHING]
        return Casualty(process.pid or 0, how, (rows[0][EPOCH], rows[0][INDEX]) if rows else None)

    def kill(self) -> None:
        """End the processes whatever they are doing, and even if they are stopped."""
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """End the processes, and the thread if it can be reached; at once, though an error's traceback may hold this for long."""
        self._asks.put(False)
        if not self._is_taking:
            self._thread.join(SHUT_DOWN_S)
        self.kill()
        for process in self._processes:
            process.join(SHUT_DOWN_S)


class _Taken(NamedTuple):
    """A micro-batch, or why there is none."""

    found: Any
    error: BaseException | None = None


def _take(iterator: Any, asks: queue.SimpleQueue[bool], answers: queue.SimpleQueue[_Taken]) -> None:
    """In the thread that takes: one micro-batch each time it is asked, until it is told to end."""
    while asks.get():
        try:
            answers.put(_Taken(next(iterator)))
        except BaseException as error:
            answers.put(_Taken(None, error))
    with suppress(Exception):  # of processes that are lost
        iterator._shutdown_workers()  # its __del__, by torch's name for it


class _Watch:
    """Since when each process is where it is, as far as this wait has seen."""

    def __init__(self, board: Board, deadline_s: float) -> None:
        self._board, self._deadline_s = board, deadline_s
        self._rows = board.rows()
        self._since = [time.monotonic()] * len(self._rows)

    def stuck(self) -> set[int]:
        """Process ids of those that are at one sample for too long; of all, if none does anything at all."""
        now, rows = time.monotonic(), self._board.rows()
        for worker, row in enumerate(rows):
            if row != self._rows[worker]:
                self._since[worker] = now
        self._rows = rows
        have_begun = all(row[PID] for row in rows)
        deadline_s = self._deadline_s if have_begun else max(self._deadline_s, START_S)
        late = [now - since >= deadline_s for since in self._since]
        reading = {
            row[PID] for row, is_late in zip(rows, late, strict=True) if is_late and row[INDEX] != NOTHING
        }
        return reading or ({row[PID] for row in rows} if all(late) else set())


def _begin_process(board: Board, worker: int) -> None:
    """In a loader process: end when told to, as torch expects, and when its rank ends, however that ends (Linux)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank's handler, inherited, would swallow it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the rank to act on
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    board.begin(worker)


@contextmanager
def _child_signals_kept() -> Generator[None]:
    """Undo what the block does to SIGCHLD; only the main thread can, and torch touches it only there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def _how(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _as_it_is(made: Any) -> Any:
    """The collate function of a loader whose dataset makes whole micro-batches."""
    return made
