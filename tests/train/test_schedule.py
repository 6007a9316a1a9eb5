"""Learning rates follow their closed forms, meet at the corners, and need nothing but the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shoal.job import Optimizer
from shoal.train.schedule import learning_rate

STEPS = 21


def rates(steps: int = STEPS, **keys: object) -> list[float]:
    """Every rate of a run, as parts of the peak."""
    optimizer = Optimizer.model_validate({"lr": 0.5, **keys})
    return [learning_rate(optimizer, step, steps) / 0.5 for step in range(steps)]


def test_warm_up_rises_linearly_and_reaches_the_peak_with_its_last_step() -> None:
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule=schedule, warmup=5)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays() -> None:
    assert rates(schedule="constant", min_lr=0.1) == [1.0] * STEPS


def test_linear_is_a_straight_line_to_the_floor() -> None:
    assert rates(schedule="linear", min_lr=0.2) == pytest.approx(
        [1 - 0.8 * step / 20 for step in range(STEPS)]
    )


def test_cosine_is_half_a_wave_to_the_floor() -> None:
    found = rates(schedule="cosine", min_lr=0.2)
    assert found == pytest.approx([0.6 + 0.4 * math.cos(math.pi * step / 20) for step in range(STEPS)])
    assert found[10] == pytest.approx(0.6), "halfway in steps is halfway in rate"


def test_wsd_stays_and_then_falls_in_a_line_over_the_last_steps() -> None:
    found = rates(schedule="wsd", warmup=3, decay=8, min_lr=0.2)
    assert found[3 : STEPS - 8] == [1.0] * (STEPS - 8 - 3)
    assert found[-8:] == pytest.approx([1 - 0.1 * step for step in range(1, 9)])


def test_the_fall_begins_after_the_step_that_has_the_peak() -> None:
    found = rates(schedule="linear", warmup=5, min_lr=0.0)
    assert found[4] == 1.0
    assert found[5] == pytest.approx(1 - 1 / 16)
    assert found[-1] == 0.0


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 50),
    st.data(),
    st.floats(0, 1),
)
@hypothesis_settings(max_examples=150, deadline=None, derandomize=True)
def test_rates_rise_to_the_peak_once_and_never_again_and_end_at_the_floor(
    schedule: str, steps: int, data: st.DataObject, floor: float
) -> None:
    decay = data.draw(st.integers(1, steps)) if schedule == "wsd" else 0
    warmup = data.draw(st.integers(0, steps - decay))
    found = rates(steps, schedule=schedule, warmup=warmup, decay=decay, min_lr=floor)
    top = max(warmup - 1, 0)
    assert all(0 <= rate <= 1 for rate in found)
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    if decay == 0 or decay < steps:
        assert found[top] == 1.0
    if schedule != "constant" and steps - 1 > top:
        assert found[-1] == pytest.approx(floor, abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_takes_it_at_the_peak(schedule: str) -> None:
    assert rates(1, schedule=schedule) == [1.0]
    assert rates(1, schedule=schedule, warmup=1) == [1.0]


def test_a_warm_up_over_all_steps_ends_at_the_peak() -> None:
    assert rates(4, schedule="cosine", warmup=4) == [0.25, 0.5, 0.75, 1.0]


def test_past_the_last_step_the_rate_stays_at_the_floor() -> None:
    optimizer = Optimizer(lr=1.0, schedule="linear", min_lr=0.1)
    assert learning_rate(optimizer, 500, 10) == pytest.approx(0.1)
