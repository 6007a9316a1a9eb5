"""A chart holds what it is drawn of, in few points and short numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.charts import axis, decimate, short, smooth

FINITE = st.floats(-1e99, 1e99)


@given(st.lists(FINITE, min_size=1), st.booleans(), st.booleans())
def test_an_axis_holds_all_values_and_has_a_few_ticks(
    values: list[float], from_zero: bool, log: bool
) -> None:
    made = axis(values, from_zero=from_zero, log=log)
    assert all(-1e-6 <= made.place(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(made.ticks) <= 12
    assert all(-1e-6 <= made.place(tick) <= 1 + 1e-6 for tick in made.ticks)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_axis_of_steps_ends_at_the_steps_and_has_whole_ticks_inside(first: int, more: int) -> None:
    made = axis([float(first), float(first + more)], whole=True, tight=True)
    assert made.ticks and all(tick == int(tick) and 0 <= made.place(tick) <= 1 for tick in made.ticks)
    if more:
        assert (made.low, made.high) == (first, first + more)


@given(st.lists(FINITE, min_size=1, max_size=3000), st.integers(20, 600))
def test_fewer_points_keep_the_ends_and_the_extremes(heights: list[float], most: int) -> None:
    points = [(float(x), y) for x, y in enumerate(heights)]
    kept = decimate(points, most)
    assert len(kept) <= most + 4
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {min(heights), max(heights)} <= {y for _, y in kept}
    assert kept == sorted(kept)


def test_a_smoothed_line_keeps_a_level_and_does_not_lag_behind_a_slope() -> None:
    assert all(math.isclose(y, 3.0) for _, y in smooth([(x, 3.0) for x in range(100)]))
    slope = smooth([(float(x), float(x)) for x in range(1000)])
    assert all(abs(x - y) < 1e-6 for x, y in slope[400:600])
    jump = [(float(x), 0.0) for x in range(1000)] + [(1000.0, 21.0)]
    assert smooth(jump)[-1][1] < 2.1, "its end is a mean, too"
    assert smooth([(0.0, 1.0)] * 19) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234, "1,234"),
        (12_345, "12.3k"),
        (5.24e9, "5.24G"),
        (3e-4, "3e-4"),
        (-2.5, "-2.5"),
        (1e20, "1e20"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
