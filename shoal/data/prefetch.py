"""Reads ahead in a background thread: a bounded queue, a deadline for the consumer, no thread left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

from shoal.data.cut import StepBatch

POLL_S = 0.1
JOIN_S = 1.0


class DataError(RuntimeError):
    """A batch could not be read; the message says which step and which samples."""


@contextmanager
def at_step(step: int) -> Generator[None]:
    """Put the step's number in front of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"step {step}: {error}") from error


class _Failure(NamedTuple):
    error: BaseException


def read_ahead(
    read: Callable[[int], StepBatch], steps: range, *, depth: int = 2, deadline_s: float = 600.0
) -> Generator[StepBatch]:
    """`map(read, steps)` with up to `depth` steps read before they are asked for.

    [Note: the reading thread] `read` runs in one thread and touches nothing that the consumer touches; the
    queue is the only thing shared. The thread looks at `closed` whenever the queue is full, so it ends at
    most POLL_S after the generator is closed, dropped, or exhausted. Only a thread stuck inside `read`
    outlives it: it is a daemon, and ends with the process.

    Raises:
        DataError: `read` failed, or gave nothing for `deadline_s` seconds. Names the step.
    """
    ready: queue.Queue[StepBatch | _Failure] = queue.Queue(maxsize=depth)
    closed = threading.Event()
    thread = threading.Thread(
        target=_read_all, args=(read, steps, ready, closed), name="shoal-data", daemon=True
    )
    thread.start()
    try:
        for step in steps:
            found = _take(ready, step, deadline_s)
            if isinstance(found, _Failure):
                raise found.error
            yield found
    finally:
        closed.set()
        thread.join(JOIN_S)


def _take(ready: queue.Queue[StepBatch | _Failure], step: int, deadline_s: float) -> StepBatch | _Failure:
    started = time.monotonic()
    try:
        return ready.get(timeout=deadline_s)
    except queue.Empty:
        raise DataError(
            f"step {step}: no batch after {time.monotonic() - started:.0f} s: the reading thread is still at "
            "this step. Is the disk or network file system that holds the token shards answering?"
        ) from None


def _read_all(
    read: Callable[[int], StepBatch],
    steps: range,
    ready: queue.Queue[StepBatch | _Failure],
    closed: threading.Event,
) -> None:
    for step in steps:
        try:
            found: StepBatch | _Failure = read(step)
        except BaseException as error:
            found = _Failure(error)
        if not _put(ready, found, closed) or isinstance(found, _Failure):
            return


def _put(
    ready: queue.Queue[StepBatch | _Failure], found: StepBatch | _Failure, closed: threading.Event
) -> bool:
    while not closed.is_set():
        try:
            ready.put(found, timeout=POLL_S)
        except queue.Full:
            continue
        return True
    return False
