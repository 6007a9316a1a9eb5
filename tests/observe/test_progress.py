"""What a person reads: one line a step that is due, and every step that was left out."""

from __future__ import annotations

import pytest

from shoal.observe.metrics import GIB, Metrics
from shoal.observe.progress import Progress


def metrics(step: int, *, skipped: bool = False, mfu: float | None = 0.4321) -> Metrics:
    return Metrics(step, 2.34567, 0.5, 3e-4, 1_000_000, 0.5, mfu, 3 * GIB // 2, skipped, "tokens")


def shown(capsys: pytest.CaptureFixture[str], steps: list[Metrics], total: int, **keys: int) -> list[str]:
    with Progress(total, shown=True, **keys) as progress:
        for step in steps:
            progress.step(step)
    return capsys.readouterr().out.splitlines()


def test_a_line_tells_the_steps_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, [metrics(7)], total=100)
    for part in (
        "step   7/100",
        "loss 2.3457",
        "norm 0.500",
        "lr 3.00e-04",
        "2,000,000 tokens/s",
        "mfu 43.2%",
        "1.50 GiB",
    ):
        assert part in line


def test_an_unknown_mfu_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, [metrics(1, mfu=None)], total=1)
    assert "mfu" not in line


def test_steps_that_are_due_and_the_last_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, [metrics(step) for step in range(1, 12)], total=11, every=5)
    assert [line.split("/")[0].split()[-1] for line in lines] == ["5", "10", "11"]


def test_a_step_that_was_left_out_is_always_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, [metrics(3, skipped=True)], total=100, every=50)
    assert "SKIPPED" in line


def test_a_line_is_not_broken_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, shown=True) as progress:
        progress.say("x" * 500)
        progress.say("[not markup]")
    assert capsys.readouterr().out.splitlines() == ["x" * 500, "[not markup]"]


def test_a_rank_that_does_not_speak_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, shown=False) as progress:
        progress.step(metrics(1))
        progress.say("hello")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_the_time_left_goes_by_the_steps_after_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress(3700, shown=True) as progress:
        now += 60  # compiling and reading before the first step do not count
        progress.step(metrics(100))
        now += 2
        progress.step(metrics(101))
        progress.step(metrics(98))  # it went back
        now += 2
        progress.step(metrics(99))
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith("left -")
    assert second.endswith("left 1:59:58")  # 3599 steps of 2 s
    assert third.endswith("left -")
    assert fourth.endswith("left 2:00:02")
