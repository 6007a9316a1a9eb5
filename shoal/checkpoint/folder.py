"""Checkpoint folders: one is there when it is complete, and not before.

A checkpoint is written into `step-00001000.tmp`, gets a manifest that lists every file with its size, then COMMIT with the
manifest's sha256, and is renamed to `step-00001000`. Files and folders are flushed before each of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal.run import size_of, write_whole

MANIFEST, INDEX, COMMIT = "manifest.json", "index.json", "COMMIT"
FORMAT = 2


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the folder and the cause."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written; the message names files and tensors."""


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

    @property
    def was_complete(self) -> bool:
        """Whether it once was a checkpoint; else a save that never finished."""
        return self.path.suffix != ".tmp"


def name_of(step: int) -> str:
    """The folder's name.

    Example:
        >>> name_of(20)
        'step-00000020'
    """
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[Refused]]:
    """Complete checkpoints, oldest first, and folders that were refused, each with the reason.

    Tensors are not read: a flipped bit in them is found by `load` and by `shoal checkpoint check`.
    """
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
    """A folder as a checkpoint, if it is a complete one: committed, its manifest whole, and every file there with its size."""
    match = re.fullmatch(r"step-(\d+)(\.old)?", path.name)
    if path.suffix == ".damaged":
        return Refused(path, "set aside when it was found damaged")
    if not match:
        return Refused(path, "a save that did not finish")
    if not (path / COMMIT).exists():
        return Refused(path, f"no {COMMIT}: the save did not finish")
    try:
        manifest = _read_manifest(path)
        sizes = dict(manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Refused(path, f"{MANIFEST} cannot be read: {error}")
    for name, size in sizes.items():
        there = size_of(path / name)
        if there != size:
            what = f"{name} has {there} bytes, expected {size}" if there is not None else f"{name} is missing"
            return Refused(path, what + _lost_from(path, name, there or 0))
    return Checkpoint(int(match[1]), path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    body = (path / MANIFEST).read_bytes()
    seal = (path / COMMIT).read_bytes()
    if not seal and json.loads(body)["format"] == 1:
        raise ValueError(
            "it has format 1, of an earlier version, which can only be read by unpickling, and is not; if you trust who "
            "wrote it: shoal checkpoint import FOLDER JOB --trust"
        )
    if seal != _seal(body):
        raise ValueError(f"it is damaged, or {COMMIT} is: its sha256 is not the one there")
    manifest = json.loads(body)
    if manifest["format"] != FORMAT:
        raise ValueError(f"it has format {manifest['format']}, this version reads format {FORMAT}")
    return manifest


def _lost_from(path: Path, file: str, at: int) -> str:
    """The tensors that lie in a file from a byte on, for a message; empty if that cannot be told."""
    try:
        table = json.loads((path / INDEX).read_bytes())
        pieces = sorted((p["at"], name) for name in table for p in table[name] if p["file"] == file)
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    whole = max((number for number, (start, _) in enumerate(pieces) if start <= at), default=0)
    lost = list(dict.fromkeys(name for _, name in pieces[whole:]))
    more = f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""
    return f"; lost are {lost[0]!r}{more}" if lost else ""


def _seal(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


def start(folder: Path, step: int) -> Path:
    """A fresh folder to write into; what an earlier, unfinished save of the step left is removed."""
    aside = folder / f"{name_of(step)}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def commit(aside: Path, manifest: dict[str, Any]) -> Path:
    """Make a written folder a checkpoint. A checkpoint of the same step is replaced by the new, complete one."""
    files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
    body = json.dumps({"format": FORMAT, **manifest, "files": files}, indent=1)
    write_whole(aside / MANIFEST, body)
    write_whole(aside / COMMIT, _seal(body.encode()).decode())
    _flush_folder(aside)
    final = aside.with_suffix("")
    older = final.with_suffix(".old")  # found as a checkpoint too: a kill at any point leaves one of them
    if final.exists():
        if older.exists():
            shutil.rmtree(older)
        final.rename(older)
    aside.rename(final)
    try:
        _flush_folder(final.parent)
    except OSError:
        final.rename(aside)  # what is said to have failed must not be found
        raise
    if older.exists():
        _remove(older)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints, and what is left of saves that never finished.

    Those that were set aside as damaged go when there is a complete one of their step or a later one.
    """
    good, refused = list_checkpoints(folder)
    newest = good[-1].step if good else -1
    for checkpoint in good[:-keep]:
        _remove(checkpoint.path)
    for entry in refused:
        step = int(re.findall(r"\d+", entry.path.name)[0])
        if entry.path.suffix in (".tmp", ".damaged") and step <= newest:
            shutil.rmtree(entry.path, ignore_errors=True)


def remove_after(folder: Path, step: int) -> None:
    """Delete checkpoints of later steps: the run went back, and goes another way from there."""
    for checkpoint in list_checkpoints(folder)[0]:
        if checkpoint.step > step:
            _remove(checkpoint.path)


def set_aside(path: Path) -> None:
    """Rename a checkpoint that was found damaged, so that it takes no place among those that are kept."""
    aside = path.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    _flush_folder(path.parent)


def _remove(path: Path) -> None:
    """Delete a checkpoint; a kill in the middle leaves no folder that looks like one."""
    aside = path.with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):  # it stays, and is tried again after the next save
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
