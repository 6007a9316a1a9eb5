"""A rank's status survives the rank, and a reader never sees half of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from shoal.observe.status import RankStatus, read_status


def test_what_is_written_is_read(tmp_path: Path) -> None:
    status = RankStatus(tmp_path / "3.status", rank=3)
    status.enter("eval", step=7)
    found = read_status(tmp_path / "3.status")
    assert found is not None
    assert (found.rank, found.pid, found.step, found.phase, found.state) == (
        3,
        os.getpid(),
        7,
        "eval",
        "running",
    )
    status.finish(8)
    assert status.read().describe() == "finished after step 8"


def test_a_status_survives_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "0.status"
    pid = os.fork()
    if pid == 0:
        RankStatus(path, rank=0).enter("save", step=2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    found = read_status(path)
    assert found is not None
    assert found.describe() == "in step 2, phase save"


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    path = tmp_path / "0.status"
    status, done = RankStatus(path, rank=0), threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            status.enter(f"phase {step}", step)
            time.sleep(1e-5)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(500):
            found = read_status(path)
            assert found is not None
            assert found.phase in (f"phase {found.step}", "start")
    finally:
        done.set()
        writer.join()


def test_no_file_is_no_status_and_another_file_is_refused(tmp_path: Path) -> None:
    assert read_status(tmp_path / "none") is None
    (tmp_path / "x").write_text("x" * 300)
    with pytest.raises(ValueError, match="not a rank's status file"):
        read_status(tmp_path / "x")


def test_without_a_path_the_status_is_the_callers_own() -> None:
    status = RankStatus(None, rank=0)
    status.enter("step", 1)
    status.fail()
    assert status.read().state == "failed"
