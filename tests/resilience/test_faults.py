"""Failures on request are read as written, drawn alike from a seed, and strike once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.observe.status import read_status
from shoal.resilience.faults import (
    DRAWN,
    PHASES,
    Fault,
    FaultyStatus,
    Seeded,
    drawn,
    parse_faults,
    require_possible,
)


def test_faults_are_read_as_written() -> None:
    text = (
        "kill rank=1 step=7; hang rank=0 step=9 phase=update ;slow rank=2 step=1 seconds=0.5; seed=3 count=2;"
    )
    assert parse_faults(text) == [
        Fault("kill", 1, 7),
        Fault("hang", 0, 9, "update"),
        Fault("slow", 2, 1, seconds=0.5),
        Seeded(3, 2),
    ]
    assert parse_faults("") == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("explode rank=1 step=2", "no kind 'explode'"),
        ("kill step=2", "no 'rank'"),
        ("kill rank=one step=2", "'one'"),
        ("kill rank=1 step=2 phase=lunch", "lunch is not known; phases: data"),
        ("kill rank=1 step=2 often=3", "often"),
        ("kill now rank=1 step=2", "now"),
        ("seed=x", "'x'"),
        ("kill rank= step=2", "''"),
        ("seed=1 often=2", "often"),
    ],
)
def test_what_is_not_understood_is_named_with_what_would_be(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"run\.faults: .*expected such as 'kill rank=1 step=7") as caught:
        parse_faults(f"kill rank=0 step=1; {text}")
    assert named in str(caught.value)


def test_a_seed_draws_the_same_faults_everywhere_and_other_seeds_others() -> None:
    def of(seed: int) -> list[Fault]:
        return drawn([Seeded(seed, 50)], ranks=4, steps=10)

    assert of(1) == of(1) != of(2)
    assert {fault.rank for fault in of(1)} == {0, 1, 2, 3}
    assert {fault.kind for fault in of(1)} == set(DRAWN)
    assert {fault.phase for fault in of(1)} == set(PHASES[:4])


def test_a_rank_or_step_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=2 of a kill: this run has ranks 0 to 1"):
        require_possible([Fault("kill", 2, 0)], ranks=2, steps=5)
    with pytest.raises(ValueError, match=r"extra needs two ranks"):
        require_possible([Fault("extra", 0, 0)], ranks=1, steps=5)
    with pytest.raises(ValueError, match=r"step=6 of a kill: this run has 5 steps"):
        require_possible([Fault("kill", 1, 6)], ranks=2, steps=5)


def test_a_fault_strikes_its_rank_in_its_place_once_also_after_a_restart(tmp_path: Path) -> None:
    faults = [Fault("raise", 1, 2, "update"), Fault("raise", 1, 4)]
    other = FaultyStatus(tmp_path / "0.status", 0, faults)
    other.enter("update", 2)
    for _ in range(2):  # the second one is of a rank that was started again
        status = FaultyStatus(tmp_path / "1.status", 1, faults)
        status.enter("forward", 2)
        if not (tmp_path / "faults.struck").exists():
            with pytest.raises(RuntimeError, match=r"a fault of run\.faults"):
                status.enter("update", 2)
            found = read_status(tmp_path / "1.status")
            assert found is not None
            assert found.describe() == "in step 2, phase update"
        status.enter("update", 2)
    with pytest.raises(RuntimeError):
        status.enter("forward", 4)
