"""`shoal plan`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.config import Settings
    from shoal.planner.memory import Memory
    from shoal.planner.predict import Prediction, RankMemory
    from shoal.planner.timing import Timing


def plan(
    job: str = typer.Argument(help="A job file, or a run directory."),
    overrides: list[str] = typer.Argument(
        None, help="key=value words, such as plan.shard=8 plan.micro_batch=1"
    ),
    on: str = typer.Option(
        None,
        "--on",
        help='The cluster, which need not exist: "8 h100", "4x8 h100"; left out: the job\'s, or this machine.',
    ),
    expandable: bool = typer.Option(
        False, "--expandable", help="With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    ),
    html: Path = typer.Option(
        None,
        "--html",
        help="Also write a page on which strategies and numbers of devices are compared; takes some minutes for a large model.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, for machines."),
) -> None:
    """Say what memory a plan needs, without the devices: a training step is simulated.

    Exits with 1 if the plan does not fit. A plan that is left to be chosen, and cannot be, does not keep --html from its page.

    Example: shoal plan examples/quickstart.toml model.preset=150m plan.shard=8 train.global_batch=64 --on "8 h100"
    """
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.config import load
    from shoal.planner.memory import Fit

    settings = load(job, overrides or [])
    if html is not None and (why := _unwritable(html)):
        raise fail(why)
    with stdout_on_stderr(active=as_json):
        cluster, prediction = _predicted(settings, on, expandable, must=html is None)
    if prediction is not None:
        typer.echo(json.dumps(_as_json(prediction))) if as_json else _show(prediction)
    if html is not None:
        with stdout_on_stderr(active=as_json):
            _write_page(html, settings, cluster, prediction, expandable)
        typer.echo(f"page     {html}", err=as_json)
    raise typer.Exit(1 if prediction is not None and prediction.fit is Fit.NOT else 0)


def _predicted(
    settings: Settings, on: str | None, expandable: bool, *, must: bool
) -> tuple[Cluster, Prediction | None]:
    """The cluster, and what the plan that is said or chosen needs there; unless there `must` be one, none may be chosen."""
    from shoal.cli.show import fail
    from shoal.cluster import Cluster
    from shoal.launch.ready import complete_plan
    from shoal.planner.predict import predict
    from shoal.world import detect_cluster

    try:
        said = on or (settings.cluster if settings.cluster != "auto" else None)
        cluster = Cluster.parse(said) if said else detect_cluster()
    except ValueError as error:
        raise fail(str(error)) from error
    try:
        plan = complete_plan(settings, cluster)
        return cluster, predict(settings, plan, cluster, expandable=expandable)
    except ValueError as error:
        if must or (settings.plan is not None and settings.plan.says_degrees):
            raise fail(str(error)) from error
        typer.echo(f"shoal: no plan is chosen: {error}", err=True)
        return cluster, None


def _unwritable(path: Path) -> str:
    """Why a page cannot be written there, as far as can be seen before the simulations; "" if it can."""
    if path.is_dir():
        return f"--html {str(path)!r} is a folder; give a file in it, such as {str(path / 'plan.html')!r}"
    if not path.parent.is_dir():
        return f"--html {str(path)!r} cannot be written: there is no folder {str(path.parent)!r}"
    if not os.access(path.parent, os.W_OK):
        return f"--html {str(path)!r} cannot be written: its folder is not writable"
    return ""


def _write_page(
    path: Path, settings: Settings, cluster: Cluster, own: Prediction | None, expandable: bool
) -> None:
    from shoal.cli.show import count_progress, fail
    from shoal.launch.ready import workload
    from shoal.planner.page import page_of
    from shoal.planner.picture import make_picture
    from shoal.run import write_whole

    try:
        with count_progress("simulated") as tell:
            picture = make_picture(
                settings, cluster, workload(settings), own=own, expandable=expandable, tell=tell
            )
        # half a surrogate pair cannot be written
        write_whole(path, page_of(picture).encode("utf-8", "replace").decode())
    except ValueError as error:
        raise fail(str(error)) from error
    except OSError as error:
        raise fail(f"--html {str(path)!r} cannot be written: {error}", code=1) from error


def _show(prediction: Prediction) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{prediction.plan.describe()} on {prediction.cluster.describe()}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB")
    for each in prediction.ranks:
        table.add_column(_title(each), justify="right")
    for name, values in _rows([each.memory for each in prediction.ranks]):
        table.add_row(name, *(f"{value / 2**30:.2f}" for value in values))
    console.print(table)
    worst = prediction.worst
    peak, verdict = worst.memory.peak, worst.verdict
    where = peak.moment.phase + (f" of {peak.moment.unit}" if peak.moment.unit else "")
    shape = "x".join(map(str, peak.last.shape)) or "scalar"
    console.print(
        f"peak     in {where}, with {peak.last.dtype} {shape} ({peak.last.nbytes / 2**30:.2f} GiB) of {peak.last.made_by}",
        markup=False,
    )
    margin = "" if verdict.margin_bytes is None else f", {verdict.margin_bytes / 2**30:+.1f} GiB to spare"
    console.print(f"verdict  {verdict.fit}{margin}", markup=False)
    for advice in verdict.advice:
        console.print(f"         try {advice}", markup=False)
    for line in _step_lines(prediction.timing):
        console.print(line, markup=False)
    console.print(f"         simulated in {prediction.seconds:.1f} s", markup=False)


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
    from shoal.planner.memory import Category

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


def _as_json(prediction: Prediction) -> dict[str, Any]:
    return {
        "plan": prediction.plan.model_dump(),
        "cluster": prediction.cluster.describe(),
        "fit": prediction.fit.value,
        "seconds": round(prediction.seconds, 3),
        "step": _step_as_json(prediction.timing),
        "ranks": [_rank_as_json(each) for each in prediction.ranks],
    }


def _step_as_json(timing: Timing) -> dict[str, Any]:
    slowest = timing.slowest
    return {
        "seconds": timing.seconds,
        "low_s": timing.low_s,
        "high_s": timing.high_s,
        "why": timing.why,
        "unit": timing.unit,
        "units_per_s": timing.units_per_s,
        "mfu": timing.mfu,
        "bound_by": timing.bound_by.value,
        "parts": {part.value: seconds for part, seconds in slowest.parts.items()},
        "communication_s": slowest.communication_s,
        "micro_batches": timing.micro_batches[0],
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
