"""When the memory that saves are handed over in is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.checkpoint.folder import CheckpointError
from shoal.train.keep import get_ready_to_save
from shoal.train.setup import Training


class Saves:
    """Notes what it was told to get ready for."""

    def __init__(self, error: Exception | None = None, problem: str = "") -> None:
        self.states: list[Any] = []
        self.problem = ""
        self._error, self._found = error, problem

    def get_ready(self, state: Any) -> None:
        self.states.append(state)
        self.problem = self._found
        if self._error is not None:
            raise self._error


def training_of(every: int, steps: int, saves: Saves | None, *, recorded: bool = False) -> Training:
    settings = SimpleNamespace(checkpoint=SimpleNamespace(every=every), train=SimpleNamespace(steps=steps))
    step = SimpleNamespace(is_recorded=recorded)
    return cast(Training, SimpleNamespace(settings=settings, saves=saves, step=step, state=lambda: {"a": 1}))


@pytest.mark.parametrize(
    ("every", "steps", "done", "due"),
    [
        (10, 100, 0, True),
        (10, 100, 89, True),
        (10, 100, 90, False),  # the last one is waited for
        (100, 100, 0, False),
        (0, 100, 0, False),
        (7, 100, 92, True),
        (7, 98, 92, False),
    ],
)
def test_it_is_made_before_the_first_step_if_a_save_comes(
    every: int, steps: int, done: int, due: bool
) -> None:
    saves = Saves()
    get_ready_to_save(training_of(every, steps, saves), done)
    assert saves.states == ([{"a": 1}] if due else [])


def test_it_is_made_by_the_first_save_where_a_device_records_its_steps() -> None:
    saves = Saves()
    get_ready_to_save(training_of(10, 100, saves, recorded=True), 0)
    assert saves.states == []


def test_where_there_is_no_room_that_is_told_at_once() -> None:
    said: list[str] = []
    events: list[dict[str, Any]] = []
    training = cast(Any, training_of(10, 100, Saves(problem="saves hold the ranks up: no room")))
    training.world = SimpleNamespace(is_main=True)
    training.progress = SimpleNamespace(say=said.append)
    training.run = SimpleNamespace(event=lambda kind, **facts: events.append({"event": kind, **facts}))
    get_ready_to_save(training, 0)
    assert said == ["saves hold the ranks up: no room"]
    assert events == [{"event": "alert", "rank": 0, "message": "saves hold the ranks up: no room"}]


def test_nobody_to_hand_over_to_and_a_state_that_cannot_be_saved_do_not_end_a_run() -> None:
    get_ready_to_save(training_of(10, 100, None), 0)
    saves = Saves(CheckpointError("no tensor"))
    get_ready_to_save(training_of(10, 100, saves), 0)
    assert len(saves.states) == 1
