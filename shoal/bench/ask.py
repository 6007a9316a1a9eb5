"""What a bench is asked for, and what its ranks answer; files of the run directory, since ranks are other processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from shoal.run import Run, write_whole

TARGET = "shoal.bench.rank:measure"
DEVICE_TARGET = "shoal.bench.device_rank:measure"


class Ask(NamedTuple):
    """What is measured."""

    steps: int
    """that are counted"""
    warmup: int | None
    """steps before them; None: as many as make the devices hot"""
    traces: str | None = None
    """the folder of profiles; None: no profile"""


def write_ask(run: Run, ask: Ask) -> None:
    """Leave it for the ranks to read."""
    write_whole(run.path / "bench.json", json.dumps(ask))


def read_ask(run: Run) -> Ask:
    """What the launcher asked for."""
    return Ask(*json.loads((run.path / "bench.json").read_text()))


def write_seconds(run: Run, seconds: float) -> None:
    """Leave for the ranks how long they may measure their devices."""
    write_whole(run.path / "bench.json", json.dumps(seconds))


def read_seconds(run: Run) -> float:
    """How long the launcher lets ranks measure."""
    return float(json.loads((run.path / "bench.json").read_text()))


def write_answer(run: Run, rank: int, answer: dict[str, Any]) -> None:
    """Leave what a rank measured."""
    write_whole(_answer_file(run, rank), json.dumps(answer))


def read_answers(run: Run, ranks: int) -> list[dict[str, Any]]:
    """What all ranks measured, by rank."""
    return [json.loads(_answer_file(run, rank).read_text()) for rank in range(ranks)]


def _answer_file(run: Run, rank: int) -> Path:
    return run.ranks / f"{rank}.bench.json"
