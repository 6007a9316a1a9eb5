"""What a prediction or a search came to, for people and for machines."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.cluster import GIB
from shoal.config import Settings
from shoal.planner.memory import Category, Memory
from shoal.planner.mixed import Mixed
from shoal.planner.picture import step_of
from shoal.planner.predict import Prediction, RankMemory
from shoal.planner.search import Found
from shoal.planner.strategies import words_of
from shoal.planner.timing import Timing

SHOWN = 8  # plans of a search
MOST_SHOWN = 6  # ranks
PASSED = 4  # of those that were not simulated
HOUR_S = 3600.0
WIDE = 10_000  # characters


def show(prediction: Prediction) -> None:
    """Print a prediction."""
    console = _console()
    console.print(f"{prediction.plan.describe()} on {prediction.cluster.describe()}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB")
    ranks = _shown(prediction.ranks)
    for each in ranks:
        table.add_column(_title(each), justify="right")
    for name, values in _rows([each.memory for each in ranks]):
        table.add_row(name, *(f"{value / 2**30:.2f}" for value in values))
    console.print(table)
    if left := [each.memory.device_bytes / 2**30 for each in prediction.ranks if each not in ranks]:
        console.print(
            f"         and {len(left)} more of the pipeline, {min(left):.2f} to {max(left):.2f} GiB; --json has all",
            markup=False,
        )
    worst = prediction.worst
    peak, verdict = worst.memory.peak, worst.verdict
    where = peak.moment.phase + (f" of {peak.moment.unit}" if peak.moment.unit else "")
    shape = "x".join(map(str, peak.last.shape)) or "scalar"
    console.print(
        f"peak     in {where}, with {peak.last.dtype} {shape} ({peak.last.nbytes / 2**30:.2f} GiB) of {peak.last.made_by}",
        markup=False,
    )
    margin = "" if verdict.margin_bytes is None else f", {_margin(verdict.margin_bytes)}"
    of = "" if verdict.fit is prediction.fit else f": the host; the device {verdict.fit}"
    console.print(f"verdict  {prediction.fit}{of}{margin}", markup=False)
    if host := prediction.host.describe():
        console.print(f"host     {prediction.host.fit}, {host}", markup=False)
    for advice in prediction.host.advice:
        console.print(f"         try {advice}", markup=False)
    for advice in verdict.advice:
        console.print(f"         try {advice}", markup=False)
    for line in _step_lines(prediction.timing):
        console.print(line, markup=False)
    console.print(f"         simulated in {prediction.seconds:.1f} s", markup=False)


def show_mixed(found: Mixed, settings: Settings, price: float | None) -> None:
    """Print what a plan needs on devices of several kinds."""
    console = _console()
    on = " + ".join(each.kind.cluster.describe() for each in found.kinds)
    console.print(f"{found.plan.describe()} on {on}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("devices", "ranks", "micro-batch", "ms of computing", "device GiB", "verdict"):
        table.add_column(name, justify="left" if name in ("devices", "verdict") else "right")
    for each in found.kinds:
        ranks = each.kind.ranks
        table.add_row(
            each.kind.cluster.describe(), f"{ranks.start}-{ranks.stop - 1}", str(each.samples),
            f"{1e3 * each.computing_s:.1f}", f"{each.memory.device_bytes / GIB:.1f}", each.verdict.fit.value,
        )  # fmt: skip
    console.print(table)
    for advice in dict.fromkeys(advice for each in found.kinds for advice in each.verdict.advice):
        console.print(f"         try {advice}", markup=False)
    for line in _step_lines(found.timing):
        console.print(line, markup=False)
    if found.equal_s is not None:
        console.print(
            f"equal    {1e3 * found.equal_s:.1f} ms with as many samples for each rank", markup=False
        )
    console.print(f"take     {words_of(found.plan, settings)}", markup=False)
    if price is not None:
        costs = cost_of(found, settings, price)
        console.print(f"cost     {costs:,.2f} for {settings.train.steps} steps", markup=False)
    console.print(f"         simulated in {found.seconds:.1f} s", markup=False)


def mixed_as_json(found: Mixed, settings: Settings, price: float | None) -> dict[str, Any]:
    """The same as plain data."""
    kinds = [
        {
            "cluster": each.kind.cluster.describe(),
            "ranks": [each.kind.ranks.start, each.kind.ranks.stop],
            "micro_batch": each.samples,
            "computing_s": each.computing_s,
            "device_bytes": each.memory.device_bytes,
            "fit": each.verdict.fit.value,
            "margin_bytes": each.verdict.margin_bytes,
        }
        for each in found.kinds
    ]
    return {
        "plan": found.plan.model_dump(),
        "words": words_of(found.plan, settings),
        "fit": found.fit.value,
        "kinds": kinds,
        "step": step_of(found.timing),
        "equal_s": found.equal_s,
        "seconds": round(found.seconds, 3),
    } | ({} if price is None else {"run_costs": cost_of(found, settings, price)})


def _margin(nbytes: int) -> str:
    """What is left, or lacks."""
    return f"{abs(nbytes) / GIB:.1f} GiB {'to spare' if nbytes >= 0 else 'too much'}"


def _console() -> Console:
    """For tables and lines of any width: a terminal breaks what is too long, and nothing is left out."""
    return Console(highlight=False, soft_wrap=True, width=WIDE)


def _shown(ranks: list[RankMemory]) -> list[RankMemory]:
    """Those at the ends, and those with the most memory."""
    most = sorted(ranks[1:-1], key=lambda each: -each.memory.device_bytes)[: MOST_SHOWN - 2]
    return [each for each in ranks if each in (ranks[0], ranks[-1], *most)]


def _step_lines(timing: Timing) -> list[str]:
    mfu = "" if timing.mfu is None else f", {100 * timing.mfu:.0f} % of peak"
    slowest = timing.slowest
    parts = [
        f"{part.value} {1e3 * seconds:.1f}"
        for part, seconds in sorted(slowest.parts.items(), key=lambda item: -item[1])
        if seconds >= 0.001 * timing.seconds
    ]
    return [
        f"step     {1e3 * timing.seconds:.1f} ms ({1e3 * timing.low_s:.1f} to {1e3 * timing.high_s:.1f}), "
        f"{timing.units_per_s:,.0f} {timing.unit}/s{mfu}; {timing.why}",
        f"         ms of it: {', '.join(parts)}; communication {1e3 * slowest.communication_s:.1f}, hidden or not",
    ]


def _title(each: RankMemory) -> str:
    last = each.rank + each.stands_for - 1
    return f"rank {each.rank}" if last == each.rank else f"ranks {each.rank}-{last}"


def _rows(memories: list[Memory]) -> list[tuple[str, list[int]]]:
    parts: list[tuple[str, list[int]]] = [
        (category.value, [memory.peak.by_category.get(category, 0) for memory in memories])
        for category in Category
    ]
    return [
        *((name, values) for name, values in parts if any(values)),
        ("peak allocated", [memory.peak.allocated_bytes for memory in memories]),
        ("reserved by the allocator", [memory.reserved_bytes for memory in memories]),
        ("device, with context and NCCL", [memory.device_bytes for memory in memories]),
        ("host", [memory.host_bytes for memory in memories]),
    ]


def as_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain data."""
    return {
        "plan": prediction.plan.model_dump(),
        "cluster": prediction.cluster.describe(),
        "fit": prediction.fit.value,
        "host": prediction.host._asdict() | {"fit": prediction.host.fit.value},
        "seconds": round(prediction.seconds, 3),
        "step": step_of(prediction.timing),
        "ranks": [_rank_as_json(each) for each in prediction.ranks],
    }


def _rank_as_json(each: RankMemory) -> dict[str, Any]:
    memory = each.memory
    peak = memory.peak
    return {
        "rank": each.rank,
        "stands_for": each.stands_for,
        "allocated_bytes": peak.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "outside_bytes": memory.outside_bytes,
        "device_bytes": memory.device_bytes,
        "host_bytes": memory.host_bytes,
        "peak": {
            "moment": peak.moment._asdict(),
            "by_category": {category.value: size for category, size in peak.by_category.items()},
            "last": peak.last._asdict(),
            "largest": [tensor._asdict() for tensor in peak.largest],
        },
        "phases": memory.phases,
        "fit": each.verdict.fit.value,
        "margin_bytes": each.verdict.margin_bytes,
        "advice": each.verdict.advice,
    }


def show_search(found: Found, settings: Settings, price: float | None) -> None:
    """Print what a search came to, the best plan first."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    heads = ["step ms", f"{_unit(found)}/s", "% of peak", "GiB", "verdict"]
    heads += ["run costs"] if price is not None else []
    for name in heads:
        table.add_column(name, justify="right")
    table.add_column("plan", no_wrap=True, overflow="ignore")
    for each in found.ranked[:SHOWN]:
        table.add_row(*_cells(each, settings, price), each.plan.describe())
    console.print(table)
    for rejected in found.rejected[:SHOWN]:
        console.print(f"out      {rejected.plan.describe()}: {rejected.why}", markup=False)
    for passed in found.passed_over[:PASSED]:
        console.print(f"skipped  {passed.plan.describe()}: {passed.why}", markup=False)
    console.print(
        f"{found.considered} plans fit the job's sizes; the states of {found.too_large} do not fit a device; "
        f"{found.simulated} were simulated, in {found.seconds:.0f} s",
        markup=False,
    )
    if found.ranked:
        best = found.ranked[0]
        console.print(f"take     {words_of(best.plan, settings)}", markup=False)
        console.print(
            f"         {best.timing.why}; {best.timing.bound_by.value} takes most of the step", markup=False
        )


def _unit(found: Found) -> str:
    return found.ranked[0].timing.unit if found.ranked else "units"


def _cells(each: Prediction, settings: Settings, price: float | None) -> list[str]:
    timing = each.timing
    mfu = "" if timing.mfu is None else f"{100 * timing.mfu:.0f}"
    cells = [
        f"{1e3 * timing.seconds:.1f}",
        f"{timing.units_per_s:,.0f}",
        mfu,
        f"{each.worst.memory.device_bytes / GIB:.1f}",
        each.fit.value,
    ]
    return [*cells, f"{cost_of(each, settings, price):,.2f}"] if price is not None else cells


def cost_of(each: Prediction | Mixed, settings: Settings, price: float) -> float:
    """Of all steps of a job.

    Args:
        price: of one device for an hour.
    """
    hours = settings.train.steps * each.timing.seconds / HOUR_S
    clusters = [each.cluster] if isinstance(each, Prediction) else [one.kind.cluster for one in each.kinds]
    return hours * sum(cluster.num_devices for cluster in clusters) * price


def search_as_json(found: Found, settings: Settings, price: float | None) -> dict[str, Any]:
    """A search as plain data."""
    plans = []
    for each in found.ranked:
        shown = as_json(each) | {"words": words_of(each.plan, settings)}
        plans.append(shown | ({"run_costs": cost_of(each, settings, price)} if price is not None else {}))
    return {
        "plans": plans,
        "rejected": [{"plan": each.plan.model_dump(), "why": each.why} for each in found.rejected],
        "passed_over": [{"plan": each.plan.model_dump(), "why": each.why} for each in found.passed_over],
        "considered": found.considered,
        "too_large": found.too_large,
        "seconds": round(found.seconds, 3),
    }
