"""Who leads: of many that claim an epoch one gets it, and what was taken over keeps nothing any more."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.resilience.epochs import (
    EPOCH,
    Beat,
    Epoch,
    beats,
    claim,
    end_of,
    folder_of,
    newest,
    note_end,
    taken_over,
    token,
)
from shoal.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    token(Run(tmp_path))
    return Run(tmp_path)


def epoch(number: int, leader: str = "one") -> Epoch:
    return Epoch(number, leader, "127.0.0.1", 4000)


def test_one_of_many_gets_an_epoch(run: Run) -> None:
    assert newest(run) is None
    for number in (1, 2, 3):
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda n, number=number: claim(run, epoch(number, f"machine {n}")), range(8)))
        assert sum(got) == 1
        found = newest(run)
        assert found is not None
        assert (found.number, found.leader) == (number, f"machine {got.index(True)}")


def test_an_epoch_that_is_over_cannot_be_claimed(run: Run) -> None:
    assert claim(run, epoch(5))
    assert not claim(run, epoch(4))
    assert not claim(run, epoch(5, "two"))
    assert claim(run, epoch(6, "two"))
    assert not list(folder_of(run).glob(".*tmp"))


def test_a_rank_of_an_older_epoch_is_told_who_took_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken_over(run) == ""  # a run on one machine has none
    claim(run, epoch(1))
    monkeypatch.setenv(EPOCH, "1")
    assert taken_over(run) == ""
    claim(run, epoch(2, "two"))
    assert "two has taken the run over (epoch 2; this rank is of epoch 1)" in taken_over(run)


def test_how_a_run_ended_is_known_of_its_last_epoch_alone(run: Run) -> None:
    assert end_of(run, 1) is None
    note_end(run, 2, {"state": "ok"})
    assert (end_of(run, 2), end_of(run, 3)) == ({"state": "ok"}, None)


def test_the_token_is_one_and_readable_by_its_user_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: token(Run(tmp_path)), range(8)))
    assert len(found) == 1
    assert len(found.pop()) == 32
    assert stat.S_IMODE((tmp_path / "epochs" / "token").stat().st_mode) == 0o600


def test_who_leads_is_alive_while_its_beat_changes(run: Run) -> None:
    assert not beats(run, 0.2)
    with Beat(run):
        assert beats(run, 5.0)
    assert not beats(run, 1.5)
