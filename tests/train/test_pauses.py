"""Garbage is collected after the same steps on every rank, and Python's own way is back afterwards."""

from __future__ import annotations

import gc

import pytest

from shoal.train.pauses import EVERY, Pauses


def test_garbage_is_collected_after_some_steps_and_not_between(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    step = 0
    monkeypatch.setattr(gc, "collect", lambda *_: collected.append(step))
    with Pauses() as pauses:
        assert not gc.isenabled()
        for step in range(5, 2 * EVERY + 5):
            pauses.after_step(step)
    assert collected == [5, EVERY, 2 * EVERY]


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_all_is_as_before(fails: bool) -> None:
    frozen = gc.get_freeze_count()
    try:
        with Pauses() as pauses:
            pauses.after_step(0)
            assert gc.get_freeze_count() > frozen
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert gc.isenabled() and gc.get_freeze_count() == 0
