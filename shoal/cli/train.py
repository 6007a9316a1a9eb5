"""`shoal train`."""

from __future__ import annotations

import json

import typer


def train(
    job: str = typer.Argument(help="A job file, or a run directory to go on with."),
    overrides: list[str] = typer.Argument(None, help="key=value words, such as plan.shard=2 train.steps=50"),
    as_json: bool = typer.Option(False, "--json", help="Print how it ended as JSON, for machines."),
) -> None:
    """Train here, on whatever this machine has.

    Example: shoal train examples/quickstart.toml train.steps=20
    """
    from shoal.cli.show import data_progress, fail, stdout_on_stderr
    from shoal.config import load
    from shoal.launch.local import launch
    from shoal.launch.ready import device_of, make_ready

    settings = load(job, overrides or [])
    with data_progress(shown=not as_json) as progress:
        settings = make_ready(
            settings, progress=progress, searched=lambda line: typer.echo(f"shoal: {line}", err=True)
        )
    assert settings.plan is not None
    try:
        with stdout_on_stderr(active=as_json):
            outcome = launch(settings, settings.plan.world_size, device=device_of(settings))
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "state": outcome.state,
                    "step": outcome.step,
                    "run": settings.run.dir,
                    "report": outcome.report,
                }
            )
        )
    raise typer.Exit(1 if outcome.state == "failed" else 0)
