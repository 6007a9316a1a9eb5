"""Checkpoint folders: one is there when it is complete, and not before.

A checkpoint is written into `step-00001000.tmp`, gets a manifest that lists every file with its size, then an empty file
COMMIT, and is renamed to `step-00001000`. Files and folders are flushed before each of these.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from shoal.run import write_whole

MANIFEST, COMMIT = "manifest.json", "COMMIT"


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    step: int
    """optimizer steps that are in it"""
    path: Path
    manifest: dict[str, Any]


class Refused(NamedTuple):
    """A folder that is no complete checkpoint."""

    path: Path
    reason: str


def name_of(step: int) -> str:
    """The folder's name.

    Example:
        >>> name_of(20)
        'step-00000020'
    """
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[Refused]]:
    """Complete checkpoints, oldest first, and folders that were refused, each with the reason."""
    good: list[Checkpoint] = []
    refused: list[Refused] = []
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        found = inspect(path)
        if isinstance(found, Checkpoint):
            good.append(found)
        else:
            refused.append(found)
    good.sort(key=lambda found: (found.step, found.path.suffix != ".old"))
    return good, refused


def inspect(path: Path) -> Checkpoint | Refused:
    """A folder as a checkpoint, if it is a complete one: committed, and every file there with its size."""
    match = re.fullmatch(r"step-(\d+)(\.old)?", path.name)
    if not match:
        return Refused(path, "a save that did not finish")
    if not (path / COMMIT).exists():
        return Refused(path, f"no {COMMIT}: the save did not finish")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        sizes = dict(manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Refused(path, f"{MANIFEST} cannot be read: {error}")
    for name, size in sizes.items():
        there = (path / name).stat().st_size if (path / name).exists() else None
        if there != size:
            return Refused(
                path,
                f"{name} has {there} bytes, expected {size}" if there is not None else f"{name} is missing",
            )
    return Checkpoint(int(match[1]), path, manifest)


def start(folder: Path, step: int) -> Path:
    """A fresh folder to write into; what an earlier, unfinished save of the step left is removed."""
    aside = folder / f"{name_of(step)}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def commit(aside: Path, manifest: dict[str, Any]) -> Path:
    """Make a written folder a checkpoint. A checkpoint of the same step is replaced by the new, complete one."""
    files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    write_whole(aside / MANIFEST, json.dumps({**manifest, "files": files}, indent=1))
    write_whole(aside / COMMIT, "")
    _flush_folder(aside)
    final = aside.with_suffix("")
    older = final.with_suffix(".old")  # found as a checkpoint too: a kill at any point leaves one of them
    if final.exists():
        shutil.rmtree(older, ignore_errors=True)
        final.rename(older)
    aside.rename(final)
    _flush_folder(final.parent)
    shutil.rmtree(older, ignore_errors=True)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints, and saves that never finished."""
    good, refused = list_checkpoints(folder)
    newest = good[-1].step if good else -1
    for checkpoint in good[:-keep]:
        shutil.rmtree(checkpoint.path, ignore_errors=True)
    for entry in refused:
        step = int(re.findall(r"\d+", entry.path.name)[0])
        if entry.path.suffix == ".tmp" and step <= newest:
            shutil.rmtree(entry.path, ignore_errors=True)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
