"""Is a checkpoint what was written? `check` reads every byte of one, or of all in a run directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.folder import Checkpoint, Refused, inspect, list_checkpoints
from shoal.checkpoint.layout import DamagedError, read_index
from shoal.checkpoint.read import check_all
from shoal.run import Run

MOST_THREADS = 8


class Checked(NamedTuple):
    """What came of checking a folder."""

    path: Path
    size_bytes: int
    seconds: float
    damage: list[str]
    """files and tensors that are not as they were written; empty if all are"""


def find(path: Path) -> list[Checkpoint | Refused]:
    """A checkpoint, or all of a run directory, oldest first, with those that are refused and why.

    Raises:
        ValueError: it is neither.
    """
    if path.name.startswith("step-") and path.is_dir():
        return [inspect(path)]
    folder = Run(path).checkpoints
    if not folder.is_dir():
        raise ValueError(
            f"{str(path)!r} is no checkpoint and no run directory: there is no {folder.name}/ in it"
        )
    good, refused = list_checkpoints(folder)
    return sorted([*good, *refused], key=lambda found: found.path.name)


def one(path: Path) -> Checkpoint:
    """A checkpoint, or the newest complete one of a run directory.

    Raises:
        ValueError: there is none; says why the last one is refused.
    """
    found = find(path)
    good = [entry for entry in found if isinstance(entry, Checkpoint)]
    if not good:
        reasons = "; ".join(
            f"{entry.path.name}: {entry.reason}" for entry in found if isinstance(entry, Refused)
        )
        raise ValueError(f"{str(path)!r} has no complete checkpoint" + (f": {reasons}" if reasons else ""))
    return max(good, key=lambda entry: entry.step)


def check(found: Checkpoint | Refused) -> Checked:
    """Read every byte of a checkpoint and compare it with its checksums."""
    began = time.perf_counter()
    if isinstance(found, Refused):
        return Checked(found.path, 0, 0.0, [found.reason])
    try:
        threads = max(1, min(MOST_THREADS, os.cpu_count() or 1))
        damage = [entry.describe() for entry in check_all(found, read_index(found), threads)]
    except (OSError, DamagedError) as error:
        damage = [str(error)]
    size = sum(found.manifest["files"].values())
    return Checked(found.path, size, time.perf_counter() - began, damage)
