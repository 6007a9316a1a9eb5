"""Runs a command with a time limit, its output in files, and ends all that it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.run import text_of


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None
    """exit code; None: ended because its time was over"""
    seconds: float
    output: Path
    errors: Path


def run_limited(command: list[str], *, cwd: Path, env: dict[str, str], log: Path, limit_s: float) -> Ended:
    """Run a command, for `limit_s` seconds at most; standard output and error go to `log`.out and `log`.err."""
    output, errors = log.with_suffix(".out"), log.with_suffix(".err")
    began = time.monotonic()
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_tree(process.pid)
            process.wait()
    return Ended(code, time.monotonic() - began, output, errors)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, those in sessions of their own too."""
    for member in (pid, *descendants(pid)):
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Ids of the processes that a process and its descendants have started and that still run (Linux)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "pid (name) state ppid ...", where the name may hold spaces and parentheses
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def last_words(path: Path, lines: int = 12, characters: int = 1200) -> str:
    """The end of a log, without blank lines."""
    text = text_of(path)
    kept = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(kept[-lines:])[-characters:]


def first_error(path: Path) -> str:
    """The first line of a log that is the end of a traceback; that of torchrun itself only says that a rank failed."""
    text = text_of(path)
    found = re.findall(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    errors = [line for line in found if "ChildFailedError" not in line]
    return errors[0][:300] if errors else "see the log"
