"""What a step is made of: the time of its work by category, what communication nothing hides, and when nothing runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.bench.categories import CATEGORIES, COMMUNICATION, category_of
from shoal.bench.trace import Span, Trace, Work

STEP = "shoal.step"
EXPOSED = "communication, exposed"
GAPS = "nothing runs"
LONGEST = 15

Interval = tuple[float, float]


class Kernel(NamedTuple):
    """All runs of one kernel (on a CPU: of one operator) in a step."""

    name: str
    category: str
    count: int
    ms: float


class Breakdown(NamedTuple):
    """One rank's step, milliseconds.

    Work of several streams overlaps: categories can add up to more than the step. What nothing else hides is exact:
    the step is (time in which something computes) + EXPOSED + GAPS.
    """

    step_ms: float
    by_category: dict[str, float]
    """every one of CATEGORIES"""
    computing_ms: float
    """at least one thing runs that is not communication"""
    exposed_ms: float
    """only communication runs"""
    gaps_ms: float
    """nothing runs"""
    longest: list[Kernel]
    """the LONGEST ones by their time in all"""


class Line(NamedTuple):
    """A line of the table over ranks; milliseconds."""

    name: str
    median: float
    most: float
    most_on: int
    """the rank that has `most`"""
    share: float
    """median over the median step"""


def break_down(trace: Trace) -> Breakdown:
    """Analyse the last step that is marked in a trace.

    A step begins when the work of the marked step before it has ended, since in a real run the device goes from one to
    the next; without one, with its own first work. It ends with its last work.

    Raises:
        ValueError: no step is marked, or it has no work.
    """
    steps = [mark for mark in trace.marks if mark.name == STEP]
    if not steps:
        raise ValueError(f"the trace has no annotation {STEP!r}")
    work = _launched_in(steps[-1], trace.work)
    if not work:
        raise ValueError("the trace has no work in its last step: was the profiler stopped too early?")
    before = _launched_in(steps[-2], trace.work) if len(steps) > 1 else []
    begin = max((one.end for one in before), default=min(one.start for one in work))
    end = max(one.end for one in work)
    inside = [one._replace(start=max(one.start, begin)) for one in work if one.end > begin]
    return _measured(inside, end - begin)


def _launched_in(step: Span, work: Iterable[Work]) -> list[Work]:
    return [one for one in work if step.start <= one.launched < step.end]


def _measured(work: list[Work], step_ms: float) -> Breakdown:
    categories = [category_of(one) for one in work]
    by_category = dict.fromkeys(CATEGORIES, 0.0)
    ms: dict[tuple[str, str], float] = defaultdict(float)
    runs: dict[tuple[str, str], set[float]] = defaultdict(set)  # an operator's own time comes in pieces
    for one, category in zip(work, categories, strict=True):
        by_category[category] += one.end - one.start
        ms[one.name, category] += one.end - one.start
        runs[one.name, category].add(one.launched)
    computing = covered((w.start, w.end) for w, c in zip(work, categories, strict=True) if c != COMMUNICATION)
    busy = covered((one.start, one.end) for one in work)
    kernels = [Kernel(*key, len(runs[key]), total) for key, total in ms.items()]
    kernels.sort(key=lambda kernel: -kernel.ms)
    return Breakdown(
        step_ms, by_category, computing, busy - computing, max(0.0, step_ms - busy), kernels[:LONGEST]
    )


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals.

    Example:
        >>> covered([(0, 2), (1, 3), (5, 6)])
        4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def over_ranks(ranks: Sequence[Breakdown]) -> list[Line]:
    """Categories, then what communication nothing hides and when nothing runs, then the step: median and most."""
    step = statistics.median(rank.step_ms for rank in ranks)
    found = [_line(name, [rank.by_category[name] for rank in ranks], step) for name in CATEGORIES]
    found.append(_line(EXPOSED, [rank.exposed_ms for rank in ranks], step))
    found.append(_line(GAPS, [rank.gaps_ms for rank in ranks], step))
    found.append(_line("step", [rank.step_ms for rank in ranks], step))
    return found


def _line(name: str, values: list[float], step: float) -> Line:
    most = max(values)
    median = statistics.median(values)
    return Line(name, median, most, values.index(most), median / step if step else 0.0)
