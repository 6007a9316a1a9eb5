"""Charts as HTML and SVG that need no script: lines over steps, and a bar a rank.

An SVG fills its box at any width while its text keeps its size: places are percentages, and lines are drawn in a nested
SVG that is stretched, with strokes that are not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Literal, NamedTuple

Point = tuple[float, float]
Kind = Literal["faint", "line", "dots", "crosses"]

MOST_POINTS = 600  # more than the pixels of a line's width would not be seen
LARGEST = 1e100  # beyond it, differences of numbers would overflow


class Series(NamedTuple):
    """Points by rising x. `faint` and `line` are connected; `crosses` stand at the top edge, whatever their y."""

    name: str
    kind: Kind
    points: Sequence[Point]
    color: int = 1


class Chart(NamedTuple):
    """Series over steps. `marks` are steps after which a run was resumed."""

    title: str
    series: Sequence[Series]
    marks: Sequence[float] = ()
    from_zero: bool = False


class Axis(NamedTuple):
    """Where values lie between 0 and 1, and which get a label."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        return ((math.log10(value) if self.log else value) - low) / (high - low)


def line_chart(chart: Chart) -> str:
    """A figure; one that says so if there is nothing to draw."""
    drawn = [series for series in chart.series if series.points]
    heights = [y for series in drawn if series.kind != "crosses" for _, y in series.points]
    if not heights:
        return _figure(chart.title, "", '<p class="none">no finite values</p>')
    across = axis([x for series in drawn for x, _ in series.points], whole=True, tight=True)
    up = axis(heights, from_zero=chart.from_zero, log=not chart.from_zero and _is_spread(heights))
    title = chart.title + (" (log scale)" if up.log else "")
    marks = [_mark(across.place(x)) for x in chart.marks if across.low <= x < across.high]
    shapes = [_shape(series, across, up) for series in drawn]
    picture = "".join([_grid(across, up), *marks, *shapes])
    label = f"{title}: from {short(heights[0])} to {short(heights[-1])}"
    return _figure(
        title, _legend(drawn, bool(marks)), _box(picture, label, _hover(drawn, across, up), "step")
    )


def bar_chart(title: str, by_rank: Mapping[int, float], unit: str) -> str:
    """A bar for each rank, from 0."""
    if not by_rank:
        return _figure(title, "", '<p class="none">no values</p>')
    values = list(by_rank.values())
    up = axis(values, from_zero=True)
    slot = 100 / len(values)
    width = min(0.7 * slot, 12.0)
    picture, hover = [_grid(None, up)], []
    for index, (rank, value) in enumerate(by_rank.items()):
        middle, height = (index + 0.5) * slot, 100 * up.place(value)
        picture.append(
            f'<rect class="c1" x="{middle - width / 2:.3f}%" y="{100 - height:.2f}%" width="{width:.3f}%" '
            f'height="{height:.2f}%"/>'
        )
        if len(values) <= 8:
            picture.append(_text(f"{middle:.2f}%", f"{100 - height:.2f}%", short(value), dy=-5))
        if index % math.ceil(len(values) / 8) == 0:
            picture.append(_text(f"{middle:.2f}%", "100%", str(rank), dy=18))
        hover.append((middle, 100 - height, f"rank {rank}: {short(value)} {unit}"))
    label = f"{title}: {short(min(values))} to {short(max(values))} {unit}"
    return _figure(f"{title}, {unit}", "", _box("".join(picture), label, hover, "rank"))


def axis(
    values: Sequence[float],
    *,
    from_zero: bool = False,
    log: bool = False,
    whole: bool = False,
    tight: bool = False,
) -> Axis:
    """An axis that holds all values; `whole` has ticks at whole numbers only, `tight` ends at the values.

    Example:
        >>> axis([0.0, 9.0]).ticks
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-290):  # as good as equal
        around = 0.5 if whole else abs(high) / 20 or 1.0
        low, high = (low if from_zero and low == 0 else low - around), high + around
    if log and low > 0:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = math.ceil((last - first) / 5)
        return Axis(10.0**first, 10.0**last, [10.0**power for power in range(first, last + 1, every)], True)
    step = _nice_step((high - low) / 5, whole)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]
    if tight:
        return Axis(low, high, [tick for tick in ticks if low <= tick <= high])
    return Axis(first * step, last * step, ticks)


def _nice_step(rough: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if rough <= factor * power * (1 + 1e-9))
    return max(1.0, math.ceil(step)) if whole else step


def _is_spread(values: Sequence[float]) -> bool:
    """A few values so large that a linear axis would press the others flat."""
    return min(values) > 0 and max(values) > 30 * statistics.median(values)


def decimate(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points that look the same: the lowest and highest of each stretch, and both ends."""
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    size = math.ceil(2 * len(points) / most)
    heights = [y for _, y in points]
    for begin in range(0, len(points), size):
        stretch = range(begin, min(begin + size, len(points)))
        kept |= {min(stretch, key=heights.__getitem__), max(stretch, key=heights.__getitem__)}
    return [points[index] for index in sorted(kept)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Means by weights that fall exponentially to both sides, over about a fiftieth of the points; nothing if they are few."""
    if len(points) < 20:
        return []
    keep = 1 - 2 / (max(5.0, len(points) / 50) + 1)
    sums = _both_sides([y for _, y in points], keep)
    weights = _both_sides([1.0] * len(points), keep)
    return [(x, total / weight) for (x, _), total, weight in zip(points, sums, weights, strict=True)]


def _both_sides(values: Sequence[float], keep: float) -> list[float]:
    """The sum over all j of `keep ** |i - j| * values[j]`, for each i."""
    before = list(accumulate(values, lambda total, value: keep * total + value))
    after = list(accumulate(reversed(values), lambda total, value: keep * total + value))
    return [left + right - value for left, right, value in zip(before, reversed(after), values, strict=True)]


def short(value: float) -> str:
    """A number in few characters.

    Example:
        >>> short(12_345), short(0.0003), short(2.5)
        ('12.3k', '3e-4', '2.5')
    """
    size = abs(value)
    for least, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if least <= size < 1e15:
            return f"{value / (1e3 if letter == 'k' else least):.3g}{letter}"
    if value == 0 or 1e-3 <= size < 1e4:
        return f"{value:,.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _figure(title: str, legend: str, body: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b>{legend}</figcaption>{body}</figure>"


def _legend(series: Sequence[Series], resumed: bool) -> str:
    if len(series) < 2 and not resumed:
        return ""
    items = (
        f'<span class="key"><i class="{one.kind} c{one.color}"></i>{escape(one.name)}</span>'
        for one in series
    )
    mark = '<span class="key"><i class="upright"></i>resumed</span>' if resumed else ""
    return f'<span class="keys">{"".join(items)}{mark}</span>'


def _box(picture: str, label: str, hover: Sequence[tuple[float, float, str]], under: str) -> str:
    """The drawing, with what it shows at each place as `x|y|text` lines for the script."""
    values = "\n".join(f"{x:.2f}|{y:.2f}|{text}" for x, y, text in hover)
    return (
        f'<div class="chart" data-values="{escape(values)}"><svg role="img" aria-label="{escape(label)}">{picture}</svg>'
        f'</div><p class="under">{under}</p>'
    )


def _grid(across: Axis | None, up: Axis) -> str:
    parts = []
    for tick in up.ticks:
        y = f"{100 * (1 - up.place(tick)):.2f}%"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(_text("0", y, short(tick), dx=-8, dy=4, anchor="end"))
    for tick in across.ticks if across else ():
        parts.append(_text(f"{100 * across.place(tick):.2f}%" if across else "", "100%", _step(tick), dy=18))
    return "".join(parts)


def _text(x: str, y: str, text: str, *, dx: int = 0, dy: int = 0, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}">{escape(text)}</text>'


def _step(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 1e5 else short(value)


def _mark(place: float) -> str:
    return f'<line class="mark" x1="{100 * place:.2f}%" x2="{100 * place:.2f}%" y1="0" y2="100%"/>'


def _shape(series: Series, across: Axis, up: Axis) -> str:
    if series.kind == "crosses":
        return "".join(
            f'<line class="cross c{series.color}" x1="{100 * across.place(x):.2f}%" x2="{100 * across.place(x):.2f}%" '
            f'y1="0" y2="10"/>'
            for x, _ in _thin(series.points)
        )
    if series.kind == "dots" or len(series.points) == 1:
        return "".join(
            f'<circle class="c{series.color}" r="4" cx="{100 * across.place(x):.2f}%" cy="{100 * (1 - up.place(y)):.2f}%">'
            f"<title>{escape(_say(series.name, x, y))}</title></circle>"
            for x, y in decimate(series.points)
        )
    path = " ".join(
        f"{1000 * across.place(x):.1f},{1000 * (1 - up.place(y)):.1f}" for x, y in decimate(series.points)
    )
    return (
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f'<polyline class="{series.kind} c{series.color}" points="{path}"/></svg>'
    )


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: math.ceil(len(points) / MOST_POINTS)]


def _hover(series: Sequence[Series], across: Axis, up: Axis) -> list[tuple[float, float, str]]:
    """Values to show at places in percent; a smoothed line has none of its own."""
    height: Callable[[Series, float], float] = lambda one, y: (  # noqa: E731
        0.0 if one.kind == "crosses" else 100 * (1 - up.place(y))
    )
    shown = [one for one in series if one.kind != "line" or len(series) == 1]
    return sorted(
        (100 * across.place(x), height(one, y), _say(one.name, x, y if one.kind != "crosses" else None))
        for one in shown
        for x, y in (_thin(one.points) if one.kind == "crosses" else decimate(one.points))
    )


def _say(name: str, x: float, y: float | None) -> str:
    return f"step {x:,.0f}: {name}" + ("" if y is None else f" {y:,.6g}")
