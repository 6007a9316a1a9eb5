"""`shoal report`."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def report(
    run: Path = typer.Argument(help="A run directory."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, for machines."),
) -> None:
    """Write a page on a run, report.html in its directory, and print its path.

    Example: shoal report runs/quickstart
    """
    from shoal.cli.show import fail
    from shoal.observe.report import write_report
    from shoal.run import Run

    try:
        path = write_report(Run(run))
    except ValueError as error:
        raise fail(str(error)) from error
    except OSError as error:
        raise fail(f"{str(run)!r} cannot be written: {error}", code=1) from error
    typer.echo(json.dumps({"report": str(path)}) if as_json else path)
