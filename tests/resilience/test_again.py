"""Between two generations of ranks: nothing of the first is left, and its failure is told from others."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.launch.after import failed, say_restart, was_stopped
from shoal.launch.errors import RankError
from shoal.launch.failure import End, Scene
from shoal.launch.nursery import Event, Order
from shoal.launch.ranks import Ranks
from shoal.resilience.restarts import Failure, Restarts
from shoal.run import Run
from tests.launch.warm import start
from tests.resilience.test_goes_on import ran


def test_a_rank_that_is_only_heard_of_after_the_kill_is_killed_too() -> None:
    """It was being forked when another one failed."""
    events, told = os.pipe()
    child = subprocess.Popen(["sleep", "60"])
    ranks = Ranks(cast(Any, None), events, cast(Any, None), ranks=1)

    def nursery() -> None:
        os.write(told, (json.dumps(Event(0, child.pid, None, 0.0)) + "\n").encode())
        os.write(told, (json.dumps(Event(0, child.pid, child.wait(), 0.0)) + "\n").encode())

    thread = threading.Thread(target=nursery)
    thread.start()
    try:
        assert ranks.wait_until_all_ended(10.0)
    finally:
        child.kill()
        thread.join()
        os.close(events)
        os.close(told)


def test_a_lost_process_that_forked_ranks_is_done_with_before_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    leave = Ranks.__exit__

    def started(order: Order) -> Ranks:
        log.append("start")
        return start(order)

    def left(ranks: Ranks, *error: object) -> None:
        log.append("leave")
        leave(ranks, *error)

    monkeypatch.setattr(Ranks, "start", started)
    monkeypatch.setattr(Ranks, "__exit__", left)
    assert ran(tmp_path, "parent rank=1 step=2").outcome.state == "ok"
    assert log == ["start", "leave"] * 2


def failure(run: Run, *, secondary: bool, began_at: float, kind: str = "RuntimeError") -> Failure:
    error = RankError(0, "here", 1, 0, "start", kind, "no", "", "", time.time(), secondary)
    ends = [End(0, 1, time.time(), None, error)]
    return failed(run, Scene(ends), began_at, quiet=True)[1]


def test_an_exception_that_only_tells_of_another_rank_is_not_the_programs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    found = [failure(run, secondary=secondary, began_at=0.0).raised for secondary in (False, True)]
    assert found == [True, False]


def test_where_earlier_ranks_began_is_not_where_these_did(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    run.event("start", step=-5)
    assert failure(run, secondary=False, began_at=0.0).begun == -5
    assert failure(run, secondary=False, began_at=time.time() + 1).begun == 0


def test_a_disk_that_is_full_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.events_file.mkdir(parents=True)  # nothing can be written
    say_restart(run, Restarts(1), Failure("full", raised=True, begun=0, done=1), quiet=True)


def test_an_error_after_a_run_went_back_is_after_steps_that_went_well(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    began_at = time.time() - 1
    run.event("start", step=10)
    run.event("rewind", step=15, to=5)
    assert failure(run, secondary=False, began_at=began_at).begun == 5


def test_a_disk_that_hangs_is_no_reason_to_start_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    found = failure(
        run, secondary=False, began_at=time.time(), kind="shoal.resilience.handover.SaveStuckError"
    )
    assert Restarts(3).refuse(found._replace(done=9, begun=0)) == found.final != ""


def test_what_was_noted_after_a_stop_does_not_make_it_another_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    for kind in ("start", "stop", "alert"):
        run.event(kind)
    assert was_stopped(run, unfinished=False)
