"""Seconds of a step are the device's, from the end of the step before or from where it goes on after a pause."""

from __future__ import annotations

import time

import pytest
import torch

from shoal.data.cut import StepBatch
from shoal.parallel.host import Sent
from shoal.train.loop import Clock
from shoal.train.result import StepResult

BATCH = StepBatch(0, ())


class Moment:
    """An event of a device whose clock is said."""

    now_ms = 0.0

    def __init__(self, **_: bool) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = Moment.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Moment) -> float:
        return later.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Moment, "now_ms", 1000.0)
    return torch.device("cuda", 0)


def ended(at_ms: float) -> StepResult:
    arrived = Moment()
    arrived.at = at_ms
    return StepResult(BATCH, 0.1, Sent(torch.zeros(5), arrived), torch.zeros(1))  # pyrefly: ignore[bad-argument-type]


def test_a_step_lasts_from_the_end_of_the_one_before(device: torch.device) -> None:
    clock = Clock(device)
    assert [clock.lap(ended(at)) for at in (1500.0, 1750.0, 1990.0)] == [0.5, 0.25, 0.24]


def test_what_happens_between_steps_is_not_counted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(device)
    clock.lap(ended(1500.0))
    monkeypatch.setattr(Moment, "now_ms", 9000.0)
    clock.restart()
    time.sleep(0.01)  # the host reads late
    assert clock.lap(ended(9250.0)) == 0.25


def test_within_a_step_the_host_tells_the_time(device: torch.device) -> None:
    clock = Clock(device)
    clock.lap(ended(1500.0))
    clock.interrupted()
    time.sleep(0.01)
    assert 0.01 <= clock.lap(ended(9250.0)) < 2.0
    assert clock.lap(ended(9500.0)) == 0.25


def test_on_a_cpu_the_host_tells_the_time() -> None:
    clock = Clock(torch.device("cpu"))
    time.sleep(0.01)
    result = StepResult(BATCH, 0.1, Sent(torch.zeros(5)), torch.zeros(1))
    assert 0.01 <= clock.lap(result) < 2.0
