"""`shoal doctor`."""

from __future__ import annotations

import json

import typer


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON, for machines."),
) -> None:
    """Look at this machine: what is there, what is not, and what it means for training.

    Example: shoal doctor
    """
    from rich.console import Console
    from rich.table import Table

    from shoal.observe.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings]))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "what", "is", "means"):
            table.add_column(column, overflow="fold")
        marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
        for finding in findings:
            table.add_row(marks[finding.verdict], finding.name, finding.value, finding.meaning)
        Console(highlight=False).print(table)
    raise typer.Exit(1 if any(finding.verdict == "problem" for finding in findings) else 0)
