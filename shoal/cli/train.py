"""`shoal train`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.config import Settings
    from shoal.launch.after import Outcome
    from shoal.launch.ranks import Ranks


def train(
    job: str = typer.Argument(help="A job file, or a run directory to go on with."),
    overrides: list[str] = typer.Argument(None, help="key=value words, such as plan.shard=2 train.steps=50"),
    as_json: bool = typer.Option(False, "--json", help="Print how it ended as JSON, for machines."),
) -> None:
    """Train here, on whatever this machine has; with run.nodes=N, on N machines that each run this command.

    Example: shoal train examples/quickstart.toml train.steps=20
    """
    from shoal.cli.show import fail, stdout_on_stderr
    from shoal.config import load
    from shoal.launch.ranks import Ranks

    settings = load(job, overrides or [])
    run = _on_this_machine if settings.run.nodes_from_to is None else _on_several_machines
    try:
        # what forks the ranks imports torch while this process does
        with stdout_on_stderr(active=as_json), Ranks.start() as nursery:
            outcome = run(settings, as_json, nursery)
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        told = {
            "state": outcome.state,
            "step": outcome.step,
            "run": settings.run.dir,
            "report": outcome.report,
        }
        typer.echo(json.dumps(told))
    raise typer.Exit(outcome.exit_code)


def _on_this_machine(settings: Settings, as_json: bool, nursery: Ranks) -> Outcome:
    from shoal.cli.show import data_progress
    from shoal.launch.local import launch
    from shoal.launch.ready import device_of, make_ready

    with data_progress(shown=not as_json) as progress:
        settings = make_ready(
            settings, progress=progress, searched=lambda line: typer.echo(f"shoal: {line}", err=True)
        )
    assert settings.plan is not None
    return launch(settings, settings.plan.world_size, device=device_of(settings), nursery=nursery)


def _on_several_machines(settings: Settings, as_json: bool, nursery: Ranks) -> Outcome:
    from shoal.cli.show import data_progress
    from shoal.launch.nodes.launch import launch_on_nodes
    from shoal.launch.ready import device_of, make_ready, with_data
    from shoal.world import detect_cluster

    with data_progress(shown=not as_json) as progress:
        with_data(settings, progress)
    return launch_on_nodes(
        settings,
        lambda said, ranks: make_ready(said, ranks=ranks),
        detect_cluster(),
        device=device_of(settings),
        nursery=nursery,
    )
