"""The culprit is the rank that failed first, not the one whose connection broke."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from shoal.launch.errors import RankError, RankFiles, is_secondary
from shoal.launch.failure import End, Gone, Scene, find_culprit, main_stack, own_report, read_ends, waits
from shoal.launch.worker import _stacks_on_request
from shoal.observe.calls import Group
from shoal.observe.host import GIB, Memory
from shoal.observe.status import RankStatus, State, Status, read_status
from shoal.world.meeting import DeadlineError
from tests.observe.test_verdict import SUM, made


def status(rank: int, step: int, state: State = "running", monotonic: float = 0.0) -> Status:
    return Status(rank, 100 + rank, "node", step, "step", state, 0.0, monotonic)


def error(rank: int, time: float, secondary: bool = False) -> RankError:
    return RankError(rank, "node", 1, 3, "step", "ValueError", "bad", "", "", time, secondary)


def test_a_stack_whose_rank_removes_it_meanwhile_is_no_stack(tmp_path: Path) -> None:
    """As a rank without a stack does when it ends; one that ends beside it reads all of them."""
    stack, end = RankFiles.of(tmp_path, 0).stack, threading.Event()

    def come_and_go() -> None:
        while not end.is_set():
            stack.touch()
            stack.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(2000):
            assert not read_ends(tmp_path, {0: (None, 0.0)})[0].stack
    finally:
        end.set()
        thread.join()


def test_a_cause_goes_before_a_lost_connection_that_was_noticed_earlier() -> None:
    ends = [
        End(0, 1, 1.0, status(0, 3, "failed"), error(0, 1.0, secondary=True)),
        End(1, 1, 2.0, status(1, 3, "failed"), error(1, 2.0)),
    ]
    assert find_culprit(Scene(ends)).rank == 1


def test_a_signal_goes_before_errors_that_came_after_it() -> None:
    ends = [
        End(0, 1, 5.0, status(0, 3, "failed"), error(0, 5.0)),
        End(1, -9, 4.0, status(1, 3), None),
    ]
    culprit = find_culprit(Scene(ends, Memory(7 * GIB, 8 * GIB)))
    assert culprit.headline == "rank 1 was killed by SIGKILL in step 3, phase step"
    assert "host memory reached 7.0 of 8.0 GiB" in culprit.details[0]
    assert "killed 1 process(es)" in find_culprit(Scene(ends, oom_kills=1)).details[0]


def test_an_abort_is_a_consequence_unless_nothing_else_happened() -> None:
    aborted = End(0, -6, 1.0, status(0, 3), None)
    assert find_culprit(Scene([aborted, End(1, 1, 2.0, status(1, 3), error(1, 2.0))])).rank == 1
    lost = End(1, 1, 2.0, status(1, 3), error(1, 2.0, secondary=True))
    assert "SIGABRT" in find_culprit(Scene([aborted, lost])).headline


def test_an_abort_that_came_before_the_deadline_of_a_wait_is_no_consequence_of_it() -> None:
    """NCCL's watchdog aborts who has waited for `deadline_s`; a rank that ends sooner ended by itself."""
    waits = End(1, None, 9.0, status(1, 3, monotonic=1.0), None)
    for seconds, named in ((3.0, 0), (60.0, 1)):
        scene = Scene([End(0, -6, seconds, status(0, 3), None), waits], deadline_s=60.0)
        assert find_culprit(scene).rank == named


def test_an_abort_goes_before_the_loss_of_a_machine_that_was_heard_after_it() -> None:
    ends = [End(0, -6, 3.0, status(0, 3), None), End(1, None, 9.0, status(1, 3), None)]
    for heard, named in ((5.0, 0), (2.0, 1)):
        gone = Gone("b", range(1, 2), "the connection was closed", heard)
        assert find_culprit(Scene(ends, gone=gone, deadline_s=60.0)).rank == named


def test_the_stuck_rank_is_the_one_behind_and_not_waiting() -> None:
    waiting = 'File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce'
    ends = [
        End(0, None, 0.0, status(0, 3, monotonic=1.0), None, waiting),
        End(1, None, 0.0, status(1, 3, monotonic=2.0), None, 'File "/x/load.py", line 7 in read'),
        End(2, None, 0.0, status(2, 4, monotonic=0.0), None, 'File "/x/load.py", line 7 in read'),
    ]
    culprit = find_culprit(Scene(ends, stalled_s=9))
    assert culprit.headline == "rank 1 is stuck for 9 s in step 3, phase step"
    assert culprit.details[0] == "at /x/load.py:7 in read"


def test_who_waits_for_ranks_that_are_steps_ahead_made_a_call_of_its_own() -> None:
    """As rank 1 of a pipeline, which calls a sum at the end of step 3 while rank 0 sends it the first micro-batch of step 4."""
    both, pair = Group("0", "", (0, 1)), Group("0/0>1", "", (0, 1))
    sent = (pair, "transfer 0 to 1 float32 (4,)")
    got = (Group("0/1>0", "", (1, 0)), "transfer 1 to 0 float32 (4,)")
    usual = [(both, SUM), (both, SUM)]
    own = {1: made(*usual, (both, SUM))}
    sends, waits_too = ({0: made(*usual, last)} | own for last in (sent, got))
    for calls, steps, named in (
        (sends, (4, 3), 1),
        (sends, (3, 3), 0),
        (sends, (2, 3), 0),
        (waits_too, (4, 3), 1),
        (waits_too, (2, 3), 0),
    ):
        lost = [
            End(rank, 1, 0.0, status(rank, steps[rank]), error(rank, 1.0, secondary=True)) for rank in (0, 1)
        ]
        stuck = [End(rank, None, 0.0, status(rank, steps[rank]), None) for rank in (0, 1)]
        culprits = [find_culprit(Scene(ends, calls=calls)) for ends in (lost, stuck)]
        assert [culprit.rank for culprit in culprits] == [named, named], steps
        if named == 1:
            alone = "rank 0 had done that step: rank 1 made a call of its own"
            assert all(alone in culprit.details[0] for culprit in culprits)


def test_a_rank_whose_process_is_gone_is_named_where_nobody_watches(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here, files = socket.gethostname(), [RankFiles.of(tmp_path, rank) for rank in (0, 1)]
    for rank, pid in enumerate((os.getpid(), ended.pid)):
        written = RankStatus(files[rank].status, rank)
        written.enter("step", 3)
        raw = bytearray(files[rank].status.read_bytes())
        raw[20:24] = pid.to_bytes(4, "little")
        files[rank].status.write_bytes(raw)
    assert (found := read_status(files[1].status)) and (found.pid, found.host) == (ended.pid, here)
    text = own_report(tmp_path, error(0, 2.0, secondary=True), 2)
    assert text.startswith("rank 0 was stopped, in step 3, phase step, because rank 1 is gone, in step 3")


def test_all_ranks_that_end_with_their_parent_are_not_called_stuck() -> None:
    ends = [End(rank, None, 1.0, status(rank, 3), None) for rank in (0, 1)]
    headline = find_culprit(Scene(ends, orphaned=range(len(ends)))).headline
    assert (
        headline
        == "the process that started the ranks is gone, and they ended with it; rank 0 was in step 3, phase step"
    )


def test_ranks_that_end_with_their_parent_on_one_machine_are_named_and_not_who_lost_them() -> None:
    ends = [End(rank, 1, 1.0, status(rank, 3), error(rank, 1.0, secondary=True)) for rank in (0, 1)]
    ends += [End(rank, None, 1.0, status(rank, 3), None) for rank in (2, 3)]
    culprit = find_culprit(Scene(ends, orphaned=range(2, 4)))
    assert culprit.rank == 2 and culprit.headline == (
        "the process that started ranks 2, 3 is gone, and they ended with it; rank 2 was in step 3, phase step"
    )


def test_errors_of_peers_are_told_from_causes() -> None:
    assert is_secondary(RuntimeError("[gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:32"))
    assert is_secondary(RuntimeError("Timed out waiting 10000ms for recv operation to complete"))
    assert is_secondary(DeadlineError("rank 0 waited for rank 1"))
    assert not is_secondary(ConnectionResetError("Connection reset by peer"))  # the user's own network
    assert not is_secondary(ValueError("bad sample"))
    try:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as lost:
            raise ValueError("my step failed") from lost
    except ValueError as wrapped:
        assert is_secondary(wrapped)


def test_of_several_dumps_the_last_is_taken(tmp_path: Path) -> None:
    def asked() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def asked_again() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    with _stacks_on_request(tmp_path / "0.stack"):
        asked()
        asked_again()
        text = (tmp_path / "0.stack").read_text()
    assert " in asked\n" in text
    assert " in asked_again\n" in main_stack(text)
    assert " in asked\n" not in main_stack(text)
    assert waits(
        main_stack(
            f'{text}Stack (most recent call first):\n  File "/x/torch/distributed/a.py", line 1 in f\n'
        )
    )


def test_an_error_is_told_by_a_status_too_as_far_as_it_fits(tmp_path: Path) -> None:
    written = RankStatus(tmp_path / "1.status", rank=1)
    written.enter("step", 3)
    for size in (3, 100_000):
        whole = error(1, 2.5)._replace(message="ä" * size, frame="x.py:3 in f", notes=["n" * 9_000] * 9)
        written.fail(whole.brief())
        (end,) = read_ends(tmp_path, {1: (None, 0.0)})
        assert end.error is not None and end.error.message
        assert whole.message.startswith(end.error.message) and (
            size > 3 or end.error.message == whole.message
        )
        assert (end.error.rank, end.error.step, end.error.phase, end.error.time) == (1, 3, "step", 2.5)
        assert (end.error.type, end.error.frame) == (whole.type, whole.frame)
    error(1, 3.0)._replace(message="whole").write(tmp_path / "1.error.json")
    (end,) = read_ends(tmp_path, {1: (None, 0.0)})
    assert end.error is not None and end.error.message == "whole"  # the file has all of it
