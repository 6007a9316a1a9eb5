"""What commands share: a progress bar for data, where output goes, and the way a wrong use ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def fail(message: str, code: int = 2) -> typer.Exit:
    """Say what is wrong on stderr; raise what it returns."""
    print(f"shoal: {message}", file=sys.stderr)
    return typer.Exit(code)


@contextmanager
def stdout_on_stderr(*, active: bool) -> Iterator[None]:
    """Let what this process and those it starts print go to stderr, so that stdout has room for one JSON document."""
    if not active:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextmanager
def data_progress(*, shown: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar a stage of data preparation; on a log, a line a stage."""
    console = Console(stderr=True, highlight=False)
    if not shown or not console.is_terminal:
        yield _lines(shown)
        return
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield tell


def _lines(shown: bool) -> Callable[[str, int, int | None], None]:
    seen: set[str] = set()

    def tell(stage: str, done: int, total: int | None) -> None:
        if shown and stage not in seen:
            seen.add(stage)
            print(f"data     {stage}", file=sys.stderr)

    return tell


@contextmanager
def count_progress(verb: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for things that are done one by one, on stderr; on a log, a line each."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda name, done, total: print(
            f"{verb} {done} of {total}: {name}", file=sys.stderr, flush=True
        )
        return
    columns = (
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=None)

        def tell(name: str, done: int, total: int) -> None:
            bars.update(task, description=escape(name), completed=done, total=total)

        yield tell
