"""`shoal status`."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def status(
    runs: list[Path] = typer.Argument(help="Run directories."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON document a run, for machines."),
) -> None:
    """Say how runs are: going on, done, stopped, failed or gone, at which step, and what was saved.

    Exits with 1 if one has failed or is gone.

    Example: shoal status runs/quickstart
    """
    from shoal.cli.show import fail
    from shoal.observe.brief import brief, brief_as_json
    from shoal.observe.story import is_run, read_story
    from shoal.run import Run

    wrong = False
    for path in runs:
        if not is_run(Run(path)):
            raise fail(
                f"{str(path)!r} is no run directory: it has no job.toml, metrics.jsonl or events.jsonl"
            )
        story = read_story(Run(path))
        wrong |= story.ending.state in ("failed", "gone")
        typer.echo(json.dumps(brief_as_json(story)) if as_json else "\n".join(brief(story)))
    raise typer.Exit(1 if wrong else 0)
