"""The command line: one file a command. Exit codes: 0 done as asked, 1 a failure, 2 a wrong use or a wrong job file."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import typer

from shoal.cli import (
    bench,
    checkpoint,
    doctor,
    export,
    plan,
    prepare,
    report,
    sample,
    schema,
    status,
    train,
    verify,
)
from shoal.config import ConfigError
from shoal.version import __version__

app = typer.Typer(
    name="shoal",
    help="Train any PyTorch model on any number of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench.app)
app.add_typer(checkpoint.app)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("prepare")(prepare.prepare)
app.command("sample")(sample.sample)
app.command("export")(export.export)
app.command("report")(report.report)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; mistakes of use end in one line and exit code 2."""
    try:
        app()
    except plan.EndsAtOnceError as end:
        with suppress(BrokenPipeError):  # who reads has heard enough
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.status)
    except ConfigError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)
