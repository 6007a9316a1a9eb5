"""`shoal plan`."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec

import typer

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.config import Settings
    from shoal.planner.predict import Prediction
    from shoal.planner.profile import Profile


Given = ParamSpec("Given")


class Ask(NamedTuple):
    """How predictions are made."""

    expandable: bool
    profile: Profile | None


class EndsAtOnceError(SystemExit):
    """All is said, and nothing is left to be closed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def without_collections(command: Callable[Given, None]) -> Callable[Given, None]:
    """A command that does not look for cycles of objects: while torch is imported that takes a second, and finds none.

    A simulation looks for those of its own. Nor does an interpreter that ends, if it ends at once: that takes another second.
    """

    @wraps(command)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        was_on, code = gc.isenabled(), 0
        gc.disable()
        try:
            command(*args, **kwargs)
        except typer.Exit as end:
            code = end.exit_code
        finally:
            if was_on:
                gc.enable()
        raise EndsAtOnceError(code)

    return run


@without_collections
def plan(
    job: str = typer.Argument(help="A job file, or a run directory."),
    overrides: list[str] = typer.Argument(
        None, help="key=value words, such as plan.shard=8 plan.micro_batch=1"
    ),
    on: str = typer.Option(
        None,
        "--on",
        help='The cluster, which need not exist: "8 h100", "4x8 h100 with 1000 GiB" (of host memory a node); '
        "left out: the job's, or this machine.",
    ),
    expandable: bool = typer.Option(
        False, "--expandable", help="With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    ),
    search: bool = typer.Option(
        False, "--search", help="Simulate plans of every kind, and rank those that fit."
    ),
    most: int = typer.Option(24, min=1, help="Simulations of a search, at most."),
    smallest: bool = typer.Option(
        False,
        "--smallest",
        help="Find the smallest part of the cluster on which the job fits, and search there.",
    ),
    largest: str = typer.Option(
        None, help="micro_batch, seq_len or layers: the largest that fits under the plan, the rest as it is."
    ),
    price: float = typer.Option(
        None, min=0.0, help="Of one device for an hour: what the job's steps cost is told, too."
    ),
    profile: Path = typer.Option(
        None, help="Of the devices, as `shoal bench device` wrote it; left out: one that comes with shoal."
    ),
    html: Path = typer.Option(
        None,
        "--html",
        help="Also write a page on which strategies and numbers of devices are compared; takes some minutes for a large model.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, for machines."),
) -> None:
    """Say what memory a plan needs and how long a step takes, without the devices: a training step is simulated.

    Exits with 1 if the plan does not fit, or with --search if none of those that were simulated does. A plan that is left to be
    chosen, and cannot be, does not keep --html from its page.

    Example: shoal plan examples/quickstart.toml model.preset=150m plan.shard=8 train.global_batch=64 --on "8 h100"
    """
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.config import load
    from shoal.planner.memory import Fit
    from shoal.planner.profile import read_profile

    settings = load(job, overrides or [])
    if html is not None and (why := _unwritable(html)):
        raise fail(why)
    try:
        ask = Ask(expandable, read_profile(profile) if profile is not None else None)
    except ValueError as error:
        raise fail(str(error)) from error
    if smallest or largest is not None:
        _refuse_together(settings, smallest=smallest, largest=largest, search=search, html=html)
    if (said := _said(settings, on)) and "+" in said:
        asked = {"--search": search, "--smallest": smallest, "--largest": largest, "--html": html}
        if more := [name for name, given in asked.items() if given]:
            raise fail(f"{more[0]} is for devices of one kind, and these are {said!r}; ask about one plan")
        raise typer.Exit(0 if _mixed(settings, said, ask, price, as_json=as_json) else 1)
    if smallest or search:
        cluster = _smallest(settings, _cluster(settings, on), ask) if smallest else _cluster(settings, on)
        fits = _search(settings, cluster, ask, most, price, as_json=as_json)
        raise typer.Exit(0 if fits else 1)
    if largest is not None:
        raise typer.Exit(0 if _largest(settings, on, ask, largest, price, as_json=as_json) else 1)
    with stdout_on_stderr(active=as_json):
        cluster, prediction = _predicted(settings, on, ask, must=html is None)
    if prediction is not None:
        _tell(prediction, settings, price, as_json=as_json)
    if html is not None:
        with stdout_on_stderr(active=as_json):
            _write_page(html, settings, cluster, prediction, expandable)
        typer.echo(f"page     {html}", err=as_json)
    raise typer.Exit(1 if prediction is not None and prediction.fit is Fit.NOT else 0)


def _search(
    settings: Settings, cluster: Cluster, ask: Ask, most: int, price: float | None, *, as_json: bool
) -> bool:
    """Whether any plan fits."""
    from shoal.cli.show import count_progress, fail, stdout_on_stderr
    from shoal.planner.search import measure_base
    from shoal.planner.search import search as find
    from shoal.planner.show import search_as_json, show_search

    try:
        with stdout_on_stderr(active=as_json), count_progress("simulated") as tell:
            base = measure_base(settings, cluster, ask.profile)
            found = find(
                settings, cluster, base, profile=ask.profile, expandable=ask.expandable, most=most, tell=tell
            )
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(search_as_json(found, settings, price)))
    else:
        show_search(found, settings, price)
    return bool(found.ranked)


def _tell(prediction: Prediction, settings: Settings, price: float | None, *, as_json: bool) -> None:
    from shoal.planner.show import as_json as to_json
    from shoal.planner.show import cost_of, show

    costs = None if price is None else cost_of(prediction, settings, price)
    if as_json:
        typer.echo(json.dumps(to_json(prediction) | ({} if costs is None else {"run_costs": costs})))
        return
    show(prediction)
    if costs is not None:
        typer.echo(f"cost     {costs:,.2f} for {settings.train.steps} steps")


def _refuse_together(
    settings: Settings, *, smallest: bool, largest: str | None, search: bool, html: Path | None
) -> None:
    """Questions that are not one."""
    from shoal.cli.show import fail
    from shoal.planner.questions import SIZES

    if largest is not None and largest not in SIZES:
        raise fail(f"--largest {largest!r} is not one of {', '.join(SIZES)}")
    if largest is not None and (smallest or search):
        raise fail(
            "--largest asks about one plan, which --smallest and --search do not have; ask one at a time"
        )
    if html is not None:
        raise fail("--html shows one cluster and no other sizes; leave out --smallest or --largest")
    if smallest and settings.plan is not None and settings.plan.says_degrees:
        raise fail(
            "--smallest chooses the degrees; leave them out of the plan (keys such as plan.recompute stay)"
        )


def _smallest(settings: Settings, within: Cluster, ask: Ask) -> Cluster:
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.planner.questions import smallest
    from shoal.planner.search import measure_base

    try:
        with stdout_on_stderr(active=True):
            base = measure_base(settings, within, ask.profile)
            found = smallest(
                settings, within, base, expandable=ask.expandable, profile=ask.profile, tell=_on_stderr
            )
    except ValueError as error:
        raise fail(str(error)) from error
    if found is None:
        raise fail(f"no plan that was simulated fits any part of {within.describe()}", code=1)
    typer.echo(f"smallest {found.describe()}", err=True)
    return found


def _largest(
    settings: Settings, on: str | None, ask: Ask, size: str, price: float | None, *, as_json: bool
) -> bool:
    """Whether any value fits."""
    from typing import cast

    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.launch.ready import complete_plan
    from shoal.planner.questions import Size, largest
    from shoal.planner.show import as_json as to_json
    from shoal.planner.show import cost_of

    cluster = _cluster(settings, on)
    try:
        plan = complete_plan(settings, cluster)
        with stdout_on_stderr(active=True):
            found = largest(
                settings, plan, cluster, cast(Size, size),
                expandable=ask.expandable, profile=ask.profile, tell=_on_stderr,
            )  # fmt: skip
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        at = None
        if found.prediction is not None:
            costs = None if price is None else cost_of(found.prediction, settings, price)
            at = to_json(found.prediction) | ({} if costs is None else {"run_costs": costs})
        typer.echo(
            json.dumps({"size": size, "value": found.value, "too_large": found.too_large, "prediction": at})
        )
    elif found.prediction is None:
        typer.echo(f"largest  none: {size} {found.too_large} does not fit")
    else:
        _tell(found.prediction, settings, price, as_json=False)
        beyond = "" if found.too_large is None else f"; {found.too_large} does not fit"
        typer.echo(f"largest  {size} {found.value}{beyond}")
    return found.value is not None


def _on_stderr(line: str) -> None:
    typer.echo(f"         {line}", err=True)


def _cluster(settings: Settings, on: str | None) -> Cluster:
    from shoal.cli.show import fail
    from shoal.cluster import Cluster
    from shoal.world import detect_cluster

    try:
        said = _said(settings, on)
        return Cluster.parse(said) if said else detect_cluster()
    except ValueError as error:
        raise fail(str(error)) from error


def _said(settings: Settings, on: str | None) -> str | None:
    return on or (settings.cluster if settings.cluster != "auto" else None)


def _mixed(settings: Settings, said: str, ask: Ask, price: float | None, *, as_json: bool) -> bool:
    """Whether it fits devices of several kinds."""
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.launch.ready import complete_plan
    from shoal.planner.memory import Fit
    from shoal.planner.mixed import parse_mixed, predict_mixed, together
    from shoal.planner.show import mixed_as_json, show_mixed

    try:
        with stdout_on_stderr(active=True):
            kinds = parse_mixed(said)
            least = min(kinds, key=lambda kind: kind.cluster.device.memory_bytes or 0)
            plan = complete_plan(settings, together(kinds, least))
            found = predict_mixed(
                settings, plan, kinds, expandable=ask.expandable, profile=ask.profile, tell=_on_stderr
            )
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(mixed_as_json(found, settings, price)))
    else:
        show_mixed(found, settings, price)
    return found.fit is not Fit.NOT


def _predicted(
    settings: Settings, on: str | None, ask: Ask, *, must: bool
) -> tuple[Cluster, Prediction | None]:
    """The cluster, and what the plan that is said or chosen needs there; unless there `must` be one, none may be chosen."""
    from shoal.cli.show import fail
    from shoal.launch.ready import complete_plan
    from shoal.planner.predict import predict

    cluster = _cluster(settings, on)
    try:
        plan = complete_plan(settings, cluster)
        return cluster, predict(settings, plan, cluster, expandable=ask.expandable, profile=ask.profile)
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
