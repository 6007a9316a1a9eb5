"""What a disturbed job left behind is judged by one rule for all systems."""

from __future__ import annotations

import pytest

from benchmarks.faults_peers_judge import (
    Row,
    done_at,
    longest_wait_s,
    naming,
    rank_pattern,
    redone,
    table,
    without_paths,
)

TORCHRUN = "E1129 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python"
VICTIM = "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:18650"


def test_a_wait_is_from_the_fault_to_the_next_step_that_was_not_done_before() -> None:
    rows = [Row(1, 1.0), Row(2, 2.0), Row(1, 6.0), Row(2, 7.0), Row(3, 8.0), Row(4, 8.5)]
    assert longest_wait_s(rows, struck_at=2.5, last=4) == 5.5
    assert redone(rows) == 2
    assert done_at(rows, 2.5) == 2


def test_a_later_wait_counts_if_it_is_longer() -> None:
    """As when a machine's ranks outlive it for a while."""
    rows = [Row(1, 1.0), Row(2, 1.5), Row(3, 9.0), Row(4, 9.5)]
    assert longest_wait_s(rows, struck_at=1.1, last=4) == 7.5


def test_a_job_that_did_not_reach_its_last_step_never_went_on() -> None:
    assert longest_wait_s([Row(1, 1.0), Row(2, 9.0)], struck_at=1.5, last=3) is None
    assert longest_wait_s([], struck_at=1.5, last=3) is None


def test_replicas_that_do_the_same_step_have_not_done_it_again() -> None:
    assert redone([Row(1, 1.0, who=0), Row(1, 1.0, who=1), Row(2, 2.0, who=1), Row(2, 5.0, who=1)]) == 1


@pytest.mark.parametrize(
    ("output", "kind", "verdict"),
    [
        ("rank 1 was killed by SIGKILL in step 12, phase forward", "kill", "both"),
        (f"{VICTIM}\n{TORCHRUN}", "kill", "both"),
        ("[rank1]: RuntimeError: an exception on purpose", "raise", "both"),
        ("RuntimeError: an exception on purpose", "raise", "cause"),
        ("rank 1 is stuck for 8 s in step 12, phase forward", "stop", "both"),
        ("[rank0]: RuntimeError: Timed out waiting 8000ms for recv", "stop", "another"),
        (VICTIM.replace("rank0", "rank1"), "kill", "another"),
        (TORCHRUN.replace("local_rank: 1", "local_rank: 0"), "kill", "cause"),
        ("rank 10 was killed by SIGKILL", "kill", "cause"),
        ("E1129 api.py:1002] failed (exitcode: 1) local_rank: 1", "raise", "who"),
        ("[INFO] rank 1 commit_failures: 0\nstep 13/40", "kill", "nothing"),
    ],
)
def test_an_output_names_a_rank_and_a_cause_if_one_line_does(output: str, kind: str, verdict: str) -> None:
    assert naming(output, kind, rank_pattern(1)).verdict == verdict


def test_a_machine_is_named_by_its_process_or_its_rank() -> None:
    who = rf"\b7\b|{rank_pattern(1)}"
    assert (
        naming("host (process 7) is gone, with rank 1: its connection was closed", "agent", who).verdict
        == "both"
    )
    assert naming(VICTIM, "agent", who).verdict == "another"


def test_a_table_has_a_row_for_each_fault_and_system_over_its_repetitions() -> None:
    one = {"system": "a", "fault": "kill", "next_step_s": 2.0, "redone": 0, "left": 0, "same": True}
    one |= {"named": "both"}
    never = one | {"next_step_s": None, "redone": 2, "same": False, "named": "another"}
    term = one | {"fault": "term", "gone_s": 1.0, "next_step_s": None, "same": None}
    assert table([one, never, term]).splitlines()[2:] == [
        "| kill | a | 2.0 s and never (1 of 2) | 0 to 2 | another, both | 0 | 1 of 2 |",
        "| term | a | all ended in 1.0 s | 0 | not asked | 0 | not asked |",
    ]
    assert table([never]).splitlines()[2] == "| kill | a | never (1 of 1) | 2 | another | 0 | 0 of 1 |"


def test_a_kept_line_has_no_folders_of_the_machine() -> None:
    line = "failed (exitcode: -9) of binary: /home/me/.venv/bin/python, at /home/me/it/shoal/train/step.py:9 in work"
    assert (
        without_paths(line) == "failed (exitcode: -9) of binary: bin/python, at shoal/train/step.py:9 in work"
    )
