"""Reading ahead: in order, a bounded number of steps, errors passed on, no thread left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from shoal.data.cut import StepBatch
from shoal.data.prefetch import DataError, read_ahead


def read(step: int) -> StepBatch:
    return StepBatch(step, ())


def data_threads() -> int:
    return sum(thread.name == "shoal-data" for thread in threading.enumerate())


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_steps_come_in_order_and_the_thread_ends_with_them() -> None:
    assert [batch.step for batch in read_ahead(read, range(3, 30))] == list(range(3, 30))
    assert data_threads() == 0


def test_at_most_depth_steps_and_one_in_hand_are_read_ahead() -> None:
    done: list[int] = []
    steps = read_ahead(lambda step: (done.append(step), read(step))[1], range(100), depth=2)
    assert next(steps).step == 0
    assert wait_for(lambda: len(done) == 4)  # one taken, two in the queue, one in the thread's hand
    time.sleep(0.05)
    assert len(done) == 4
    steps.close()


def test_closing_or_dropping_the_generator_ends_the_thread() -> None:
    steps = read_ahead(read, range(100))
    next(steps)
    assert data_threads() == 1
    steps.close()
    assert data_threads() == 0
    steps = read_ahead(read, range(100))
    next(steps)
    del steps
    assert data_threads() == 0
    read_ahead(read, range(100))  # never asked: never started
    assert data_threads() == 0


def test_an_error_reaches_the_consumer_at_its_step() -> None:
    def fails(step: int) -> StepBatch:
        if step == 2:
            raise DataError("step 2: sample 17")
        return read(step)

    steps = read_ahead(fails, range(10))
    assert [next(steps).step, next(steps).step] == [0, 1]
    with pytest.raises(DataError, match="step 2: sample 17"):
        next(steps)
    assert data_threads() == 0


def test_a_stuck_reader_is_named_after_the_deadline() -> None:
    release = threading.Event()
    steps = read_ahead(lambda step: (release.wait(), read(step))[1], range(5, 10), deadline_s=0.1)
    threading.Timer(0.5, release.set).start()
    with pytest.raises(DataError, match="step 5: no batch after 0 s: the reading thread is still at"):
        next(steps)
