"""Loader processes that die or hang are replaced, and what they were to read is read again, bit for bit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.bad import EVERY_EPOCH
from shoal.data.batches import DataError, batches
from shoal.data.loaders import POLL_S
from shoal.job import Data, Job, Train
from shoal.plan import Plan
from tests.data.sources import Augmented, Deadly, Numbers, Place, ShuffledStream, Stuck
from tests.data.test_bad import Told

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
PLAN = Plan(micro_batch=2)


def job(workers: int = 2, steps: int = 6, **data: Any) -> Job:
    return Job(data=Data(workers=workers, **data), train=Train(global_batch=4, steps=steps, seed=3))


def read(
    dataset: Any, job: Job, bad: Told | None = None, between: Callable[[int], None] = lambda step: None
) -> list[Any]:
    """What each micro-batch holds, with something done after each step."""
    found = []
    for batch in batches(dataset, job, PLAN, Place(0, 1), bad=bad):
        found += [[part.tolist() for part in micro.data] for micro in batch.micro_batches]
        between(batch.step)
    return found


def strike(how: signal.Signals, which: slice) -> None:
    for process in sorted(multiprocessing.active_children(), key=lambda child: child.pid or 0)[which]:
        os.kill(process.pid or 0, how)
        if how == signal.SIGKILL:
            process.join(10)


@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(None)], ids=["first", "second", "all"])
@pytest.mark.parametrize("dataset", [Augmented(9), ShuffledStream(30)], ids=["map", "stream"])
def test_processes_that_are_killed_while_the_rank_trains_are_replaced(
    dataset: Any, which: slice, step: int
) -> None:
    def between(done: int) -> None:
        if done == step:
            strike(signal.SIGKILL, which)
            torch.ones(9).sum()  # nothing may be raised here, in the middle of a step

    bad = Told()
    assert read(dataset, job(), bad, between) == read(dataset, job(0))
    replaced = [told for kind, told in bad.events if kind == "loader restarted"]
    # of a stream that has been read to its end the processes have left by themselves
    assert len(replaced) == len(range(2)[which]) or (isinstance(dataset, ShuffledStream) and step == 4)
    for told in replaced:
        assert (told["rank"], told["reason"]) == (0, "was killed by SIGKILL")
        assert told["step"] == step + 1


def test_a_process_that_is_stopped_is_found_by_the_deadline_and_replaced() -> None:
    def between(done: int) -> None:
        if done == 1:
            strike(signal.SIGSTOP, slice(0, 1))

    bad = Told()
    began = time.monotonic()
    assert read(Augmented(40), job(steps=9, deadline_s=1.0), bad, between) == read(
        Augmented(40), job(0, steps=9)
    )
    assert time.monotonic() - began < 8
    assert {told["reason"] for _, told in bad.events} == {"made no progress for 1 s (data.deadline_s)"}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("how", "said"), [(-9, "was killed by SIGKILL"), (-11, "SIGSEGV"), (7, "exit code 7")]
)
def test_a_process_that_dies_at_a_sample_is_replaced_and_the_sample_read_again(
    how: int, said: str, tmp_path: Path
) -> None:
    bad = Told()
    found = read(Deadly(9, how, times=2, folder=tmp_path), job(), bad)
    assert found == read(Augmented(9), job(0))
    assert [(told["index"], told["epoch"]) for kind, told in bad.events if kind == "loader restarted"] == [
        (5, 0)
    ] * 2
    assert all(said in told["reason"] for _, told in bad.events)


def test_a_sample_that_kills_three_processes_is_bad() -> None:
    message = r"step [01]: sample 5 \(epoch 0\) cannot be read by rank 0: 3 loader processes were lost .* killed by SIGKILL"
    with pytest.raises(DataError, match=message):
        read(Deadly(9), job(shuffle=False))


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_sample_that_kills_is_left_out_in_every_epoch(on_error: str) -> None:
    bad = Told()
    settings = job(on_error=on_error, most_bad=1.0)
    known = Told()
    known.known[5] = EVERY_EPOCH
    assert read(Deadly(9), settings, bad) == read(Augmented(9), settings, known)
    assert bad.known == {5: EVERY_EPOCH}
    assert [kind for kind, _ in bad.events] == ["loader restarted"] * 3 + ["bad sample"]
    assert bad.events[-1][1]["error"].startswith(
        "3 loader processes were lost while they read it; the last was killed"
    )


def test_a_sample_that_never_comes_is_bad_after_three_deadlines() -> None:
    bad = Told()
    settings = job(1, steps=2, shuffle=False, deadline_s=0.5, on_error="skip", most_bad=1.0)
    found = [
        micro.data.tolist()
        for batch in batches(Stuck(8), settings, PLAN, Place(0, 1), bad=bad)
        for micro in batch.micro_batches
    ]
    assert found == [[0, 1], [2, 3], [4], [6, 7]]
    assert bad.known == {5: EVERY_EPOCH}
    assert [told["index"] for _, told in bad.events] == [5] * 4


class Slow(Numbers):
    """A micro-batch takes longer than any sample may."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.4)
        return index


def test_a_deadline_is_for_a_sample_and_not_for_a_micro_batch() -> None:
    bad = Told()
    settings = Job(data=Data(workers=1, deadline_s=0.8), train=Train(global_batch=4, steps=1))
    (batch,) = batches(Slow(4), settings, Plan(micro_batch=4), Place(0, 1), bad=bad)
    assert sorted(batch.micro_batches[0].data.tolist()) == [0, 1, 2, 3]
    assert bad.events == []


class Collapsing(Numbers):
    """Its processes die where no sample is to blame."""

    def collate_fn(self, samples: list[int]) -> Any:
        os._exit(3)


def test_processes_that_die_again_and_again_with_no_sample_to_blame_end_the_run() -> None:
    with pytest.raises(
        DataError, match=r"step 0: loader processes were replaced 3 times in a row, .*fewer data.workers"
    ):
        read(Collapsing(8), job(1))


class Wide(Augmented):
    """Micro-batches that no shared memory carries: a process that is killed leaves half of one in the pipe."""

    def collate_fn(self, samples: list[Any]) -> Any:
        return [np.full(1 << 18, float(sample[0])) for sample in samples]


def test_half_a_micro_batch_that_a_process_leaves_behind_is_not_waited_for() -> None:
    def between(done: int) -> None:
        time.sleep(0.1)  # until they are at it
        strike(signal.SIGKILL, slice(done % 2, done % 2 + 1))
        time.sleep(0.1)

    assert read(Wide(20), job(steps=4), None, between) == read(Wide(20), job(0, steps=4))


def test_the_process_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    with caplog.at_level(logging.WARNING):
        steps = batches(Augmented(9), job(), PLAN, Place(0, 1))
        next(steps)
        assert signal.getsignal(signal.SIGCHLD) == handler
        strike(signal.SIGKILL, slice(0, 1))
        time.sleep(2 * POLL_S)
        next(steps)
    assert "loader restarted: step 1, rank 0, pid" in caplog.text  # where nobody listens, it is logged
    steps.close()
    assert not multiprocessing.active_children()
