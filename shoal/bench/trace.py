"""A profiler's Chrome trace as a list of work, each with the operators in which the host launched it.

On a GPU work is a kernel or a copy. On a CPU it is the part of an operator's time that no operator inside it takes. An
annotation whose name begins with `shoal.` holds for all threads while it is open: backward's operators run on a thread of
their own, yet belong to the phase of the step in which they run.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

OURS = "shoal."
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
HOST = ("cpu_op", "user_annotation")
# the work of CPU collectives, which torch records as annotations of threads of their own
OF_COLLECTIVES = ("gloo:", "mpi:", "ucc:")
ROUNDING_MS = 2e-6  # times in a trace are rounded to nanoseconds

Thread = tuple[Any, Any]


class Work(NamedTuple):
    """Something that took time; milliseconds since the trace's zero."""

    name: str
    start: float
    end: float
    under: tuple[str, ...]
    """annotations of ours, then the operators and annotations of its thread, outermost first"""
    launched: float
    """when the host asked for it"""


class Span(NamedTuple):
    """An operator or annotation of the host."""

    name: str
    start: float
    end: float
    is_work: bool
    """it computes; an annotation only names what is inside"""


class Trace(NamedTuple):
    """All work of a trace, and the annotations of ours."""

    work: list[Work]
    marks: list[Span]


def read_trace(path: Path) -> Trace:
    """Read a Chrome trace, gzipped or not.

    Raises:
        ValueError: the file is no such trace.
    """
    data = path.read_bytes()
    table = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    if not isinstance(table, dict) or "traceEvents" not in table:
        raise ValueError(f"{path} is no Chrome trace: it has no traceEvents")
    return trace_of(table["traceEvents"])


def trace_of(events: Iterable[dict[str, Any]]) -> Trace:
    """The work of a list of Chrome trace events."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[str(event.get("cat", "")).lower()].append(event)
    spans: dict[Thread, list[Span]] = defaultdict(list)
    for event in (event for kind in HOST for event in by_kind[kind]):
        spans[_thread(event)].append(_span(event))
    marks = [s for some in spans.values() for s in some if s.name.startswith(OURS)]
    marks.sort(key=lambda mark: (mark.start, -mark.end))
    kernels = [event for kind in ON_GPU for event in by_kind[kind]]
    if kernels:
        launches = [event for kind in LAUNCHES for event in by_kind[kind]]
        return Trace(_on_gpu(kernels, launches, spans, marks), marks)
    return Trace([work for some in spans.values() for work in _on_host(some, marks)], marks)


def _on_gpu(
    kernels: list[dict[str, Any]],
    launches: list[dict[str, Any]],
    spans: dict[Thread, list[Span]],
    marks: list[Span],
) -> list[Work]:
    """Kernels, each with what was open on the thread that launched it."""
    asked: dict[Any, tuple[Thread, float]] = {}
    for event in launches:
        if (number := event.get("args", {}).get("correlation")) is not None:
            asked[number] = (_thread(event), event["ts"] / 1000)
    times: dict[Thread, set[float]] = defaultdict(set)
    for thread, time in asked.values():
        times[thread].add(time)
    open_at = {
        (thread, time): names
        for thread, some in times.items()
        for time, names in _open_at(sorted(some), spans[thread])
    }
    found = []
    for event in kernels:
        start, end = _times(event)
        place = asked.get(event.get("args", {}).get("correlation"))
        launched = place[1] if place else start
        under = (*_marks_at(launched, marks), *(open_at[place] if place else ()))
        found.append(Work(event["name"], start, end, under, launched))
    return found


def _on_host(spans: list[Span], marks: list[Span]) -> Iterator[Work]:
    """The own time of each operator of a thread, in pieces."""
    pieces: list[Work] = []
    since = 0.0

    def up_to(now: float, stack: list[Span]) -> None:
        nonlocal since
        if stack and stack[-1].is_work and now > since:
            outer = (span.name for span in stack[:-1] if not span.name.startswith(OURS))
            under = (*_marks_at(since, marks), *outer)
            pieces.append(Work(stack[-1].name, since, now, under, stack[-1].start))
        since = now

    _walk(spans, up_to)
    return iter(pieces)


def _walk(spans: list[Span], up_to: Callable[[float, list[Span]], None]) -> None:
    """Tell `up_to(time, open spans)` before each begin and end of a thread's spans."""
    stack: list[Span] = []

    def close(until: float) -> None:
        while stack and stack[-1].end <= until + ROUNDING_MS:
            up_to(stack[-1].end, stack)
            stack.pop()

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        close(span.start)
        up_to(span.start, stack)
        stack.append(span)
    close(float("inf"))


def _open_at(times: list[float], spans: list[Span]) -> Iterator[tuple[float, tuple[str, ...]]]:
    """For each time, names of the spans that are open then, outermost first; annotations of ours are told elsewhere."""
    stack: list[Span] = []
    coming = iter(sorted(spans, key=lambda span: (span.start, -span.end)))
    following = next(coming, None)
    for time in times:
        while following is not None and following.start <= time:
            while stack and stack[-1].end <= following.start + ROUNDING_MS:
                stack.pop()
            stack.append(following)
            following = next(coming, None)
        yield time, tuple(s.name for s in stack if s.end >= time and not s.name.startswith(OURS))


def _marks_at(time: float, marks: list[Span]) -> tuple[str, ...]:
    return tuple(mark.name for mark in marks if mark.start <= time < mark.end)


def _span(event: dict[str, Any]) -> Span:
    name = str(event["name"])
    is_work = event["cat"] == "cpu_op" or name.startswith(OF_COLLECTIVES)
    return Span(name, *_times(event), is_work)


def _times(event: dict[str, Any]) -> tuple[float, float]:
    """Begin and end; a trace has microseconds."""
    return event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000


def _thread(event: dict[str, Any]) -> Thread:
    return event.get("pid"), event.get("tid")
