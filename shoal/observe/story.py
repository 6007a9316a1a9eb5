"""`read_story`: what happened in a run, read from its directory while it goes on or after any end.

Nothing in a file is taken for granted: what does not fit is left out, and `notes` says so.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shoal.checkpoint.folder import Checkpoint, Refused, inspect
from shoal.observe.charts import LARGEST
from shoal.observe.status import Status, read_status
from shoal.run import Run

State = Literal["finished", "stopped", "failed", "running", "gone"]
Record = dict[str, Any]

DEADLINE_S = 600.0  # the default of run.deadline_s, after which a rank that does not move is lost


class StepRow(NamedTuple):
    """One optimizer step; what is missing or not finite is None. `units` are tokens or samples."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    units: float | None
    seconds: float | None
    units_per_s: float | None
    mfu: float | None
    skipped: bool


class Ending(NamedTuple):
    """How a run ended, or that it has not; `message` is the cause of a failure."""

    state: State
    message: str = ""


@dataclass(frozen=True)
class Story:
    """A run as its files tell it. `evals` are (step, loss), None if not finite; `memory` is bytes by rank."""

    run: Run
    job: Record
    steps: list[StepRow]
    unit: str
    evals: list[tuple[int, float | None]]
    events: list[Record]
    memory: dict[int, int]
    ending: Ending
    checkpoints: list[Checkpoint]
    refused: list[Refused]
    texts: dict[str, str]
    notes: list[str]

    @property
    def last_step(self) -> int:
        """Optimizer steps that are done."""
        told = [event["step"] for event in self.events if is_step(event.get("step"))]
        return max([row.step for row in self.steps[-1:]] + told[-1:], default=0)

    @property
    def start(self) -> Record:
        """The event of the newest start; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})


def is_run(run: Run) -> bool:
    """Whether a directory has any of the files that a run begins with."""
    return any(path.is_file() for path in (run.job_file, run.metrics_file, run.events_file))


def read_story(run: Run) -> Story:
    """Read all files of a run directory that a report needs."""
    notes: list[str] = []
    lines = list(_json_lines(run.metrics_file, notes))
    events = [event for event in _json_lines(run.events_file, notes) if isinstance(event.get("event"), str)]
    names = ("job.toml", "plan.toml", "cluster.toml", "ranks/failure.txt")
    texts = {name: text for name in names if (text := _text(run.path / name, notes)).strip()}
    job = read_toml(texts.get("job.toml", ""), "job.toml", notes)
    checkpoints, refused = _checkpoints(run.checkpoints)
    unit = "samples" if any("samples" in line for line in lines[:100]) else "tokens"
    return Story(
        run=run,
        job=job,
        steps=_steps(lines, unit),
        unit=unit,
        evals=_evals(lines),
        events=events,
        memory=_memory_by_rank(run.ranks, events, notes),
        ending=_ending(run, events, number(value_of(job, "run", "deadline_s")) or DEADLINE_S, notes),
        checkpoints=checkpoints,
        refused=refused,
        texts=texts,
        notes=notes,
    )


def number(value: Any) -> float | None:
    """A finite number that can be drawn; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def is_step(value: Any) -> bool:
    """A whole number that counts optimizer steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def value_of(table: Any, *path: str) -> Any:
    """A value inside tables; None if it is not there."""
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    return table


def read_toml(text: str, name: str, notes: list[str]) -> Record:
    """The table in a file's text; empty, with a note, if it is not TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{name} is not TOML: {error}")
        return {}


def _text(path: Path, notes: list[str]) -> str:
    """A file's text, empty if there is none; bytes that are not UTF-8 are shown as such."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return ""


def _json_lines(path: Path, notes: list[str]) -> Iterable[Record]:
    """Objects of a .jsonl file; a note counts lines that hold none, such as one that a crash cut short."""
    bad = 0
    for line in _text(path, notes).split("\n"):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            record = line
        if isinstance(record, dict):
            yield record
        elif record is not None:
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} line{'s' * (bad > 1)} cut short or not a JSON object, left out")


def _steps(lines: list[Record], unit: str) -> list[StepRow]:
    """By rising step, each once: the line that was written last."""
    rows = {
        line["step"]: StepRow(
            step=line["step"],
            loss=number(line.get("loss")),
            grad_norm=number(line.get("grad_norm")),
            lr=number(line.get("lr")),
            units=number(line.get(unit)),
            seconds=number(line.get("seconds")),
            units_per_s=number(line.get(f"{unit}_per_s")),
            mfu=number(line.get("mfu")),
            skipped=line.get("skipped") is True,
        )
        for line in lines
        if is_step(line.get("step")) and "eval_loss" not in line
    }
    return [rows[step] for step in sorted(rows)]


def _evals(lines: list[Record]) -> list[tuple[int, float | None]]:
    found = {
        line["step"]: number(line["eval_loss"])
        for line in lines
        if is_step(line.get("step")) and "eval_loss" in line
    }
    return sorted(found.items())


def _memory_by_rank(folder: Path, events: list[Record], notes: list[str]) -> dict[int, int]:
    """The most that each rank has said it holds; ranks of an earlier, larger world do not count.

    Files of many ranks are searched, not parsed: that is 10 times faster.
    """
    starts = [event.get("world_size") for event in events if event["event"] == "start"]
    told = starts[-1] if starts else None
    size = told if isinstance(told, int) else math.inf
    found = {}
    for path in folder.glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) < size:
            held = re.findall(r'"memory": ?(\d{1,18})[,}]', _text(path, notes))
            if held:
                found[int(path.stem)] = max(map(int, held))
    return dict(sorted(found.items()))


def _checkpoints(folder: Path) -> tuple[list[Checkpoint], list[Refused]]:
    """Complete checkpoints and other folders, oldest first."""
    found = [_inspect(path) for path in sorted(folder.glob("step-*"))]
    good = [entry for entry in found if isinstance(entry, Checkpoint)]
    return good, [entry for entry in found if isinstance(entry, Refused)]


def _inspect(path: Path) -> Checkpoint | Refused:
    try:
        return inspect(path)
    except (TypeError, AttributeError, ValueError, OSError) as error:
        return Refused(path, f"its manifest is not understood: {error}")


def _ending(run: Run, events: list[Record], deadline_s: float, notes: list[str]) -> Ending:
    """From the last event that decides it; without one, from what the ranks last said."""
    kinds = {"start", "end", "stop", "fault", "killed"}
    last = next((event for event in reversed(events) if event["event"] in kinds), {"event": "start"})
    if last["event"] == "fault":
        message = str(last.get("message", ""))
        return Ending(
            "failed", message if message.startswith("rank ") else f"rank {last.get('rank', '?')}: {message}"
        )
    if last["event"] == "killed":
        return Ending("failed", str(last.get("reason", "")))
    if last["event"] != "start":
        return Ending("finished" if last["event"] == "end" else "stopped")
    statuses = _statuses(run.ranks, notes)
    if any(status.state == "failed" for status in statuses):
        return Ending("failed", _error(run.ranks, notes))
    now = time.time()
    return Ending("running" if any(_is_alive(status, now, deadline_s) for status in statuses) else "gone")


def _statuses(folder: Path, notes: list[str]) -> list[Status]:
    found = []
    for path in sorted(folder.glob("*.status")):
        try:
            status = read_status(path)
        except (ValueError, OSError) as error:
            notes.append(str(error))
            continue
        found += [status] if status is not None else []
    return found


def _is_alive(status: Status, now: float, deadline_s: float) -> bool:
    """A rank that runs has moved within the deadline; one of this host also has a process."""
    if status.state != "running" or not math.isfinite(status.changed) or now - status.changed > deadline_s:
        return False
    return status.host != socket.gethostname() or _has_process(status.pid)


def _has_process(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _error(folder: Path, notes: list[str]) -> str:
    """What the ranks' error files say: of one that failed by itself, rather than one that missed another."""
    found = []
    for path in sorted(folder.glob("*.error.json")):
        try:
            error = json.loads(_text(path, notes))
        except (ValueError, RecursionError):
            notes.append(f"{path.name} is not JSON")
            continue
        if isinstance(error, dict):
            found.append(error)
    first = min(found, key=lambda error: error.get("secondary") is True, default=None)
    if first is None:
        return "a rank failed without a word"
    return f"rank {first.get('rank', '?')}: {first.get('type', 'error')}: {first.get('message', '')}"
