"""What is written of a checkpoint, whoever writes it: the file of a rank, the index, and the manifest that makes a folder one.

Without torch: the ranks write their own tensors, or their launcher what they handed over to it (see `saver`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from shoal.checkpoint.folder import INDEX, commit, prune
from shoal.checkpoint.layout import HEADER_BYTES, Origin, Piece, index_text
from shoal.run import write_whole
from shoal.version import __version__

Item = TypeVar("Item")
Made = TypeVar("Made")


class Part(NamedTuple):
    """A box of a tensor that is to be written."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int
    """in bytes"""
    blocks: Iterable[memoryview]
    """its bytes, 4 MiB at a time; each is asked for when the one before has been written"""


class Contents(NamedTuple):
    """What a manifest says of a save as a whole."""

    facts: dict[str, Any]
    """of who saves: the job, the plan, the version of torch"""
    tensors: dict[str, dict[str, Any]]
    """shape and type of each"""


def require_room(folder: Path, needed_bytes: int) -> None:
    """Refuse before anything is written if it will not fit. Some network file systems say 0 of 0 bytes: not known."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_parts(
    folder: Path, origin: Origin, parts: Iterable[Part], threads: int = 1
) -> list[tuple[str, Piece]]:
    """Write a rank's file, flushed to the disk when this returns; returns where each tensor's part lies.

    With several threads each writes a stretch of the file.
    """
    path = folder / origin.file
    with path.open("wb") as file:
        file.write(origin.header())
        stretches = _stretches(list(parts), threads)
        if len(stretches) == 1:
            written = _write_stretch(file, *stretches[0])
        else:
            file.flush()
            by_stretch = side_by_side(
                lambda stretch: _write_beside(path, *stretch), stretches, len(stretches)
            )
            written = [entry for entries in by_stretch for entry in entries]
        file.flush()
        os.fsync(file.fileno())
    return written


def side_by_side(function: Callable[[Item], Made], items: Sequence[Item], most: int) -> list[Made]:
    """`function` of each item, by at most `most` threads; raises the first error when all are through.

    Their threads are daemons, which those of a ThreadPoolExecutor are not: one inside a call that never returns, as on a disk
    that hangs, would keep the process from ending.
    """
    made: dict[int, Made] = {}
    errors: list[Exception] = []
    left = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                place = next(left, None)
            if place is None or errors:
                return
            try:
                made[place] = function(items[place])
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [made[place] for place in range(len(items))]


def _stretches(parts: list[Part], count: int) -> list[tuple[int, list[Part]]]:
    """Parts in a row, cut into about `count` stretches of about as many bytes, and where each begins in the file."""
    share = -(-sum(part.size for part in parts) // count)
    found: list[tuple[int, list[Part]]] = [(HEADER_BYTES, [])]
    at = HEADER_BYTES
    for part in parts:
        if at - found[-1][0] >= share and part.size:
            found.append((at, []))
        found[-1][1].append(part)
        at += part.size
    return found


def _write_beside(path: Path, at: int, parts: list[Part]) -> list[tuple[str, Piece]]:
    with path.open("r+b") as file:
        file.seek(at)
        return _write_stretch(file, at, parts)


def _write_stretch(file: BinaryIO, at: int, parts: list[Part]) -> list[tuple[str, Piece]]:
    written = []
    for part in parts:
        written.append((part.name, _write_part(file, part, at)))
        at += part.size
    return written


def _write_part(file: BinaryIO, part: Part, at: int) -> Piece:
    sums = []
    for block in part.blocks:
        sums.append(zlib.crc32(block))
        file.write(block)
    return Piece(part.offsets, part.sizes, Path(file.name).name, at, tuple(sums))


def write_index(folder: Path, names: Iterable[str], written: Iterable[tuple[str, Piece]]) -> str:
    """Write the index of what all ranks wrote; returns its SHA-256."""
    pieces: dict[str, list[Piece]] = {name: [] for name in names}
    for name, piece in written:
        if piece.crc32:  # a rank may hold nothing of a tensor that does not divide
            pieces[name].append(piece)
    text = index_text(pieces)
    write_whole(folder / INDEX, text)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(aside: Path, origin: Origin, contents: Contents, index_sha256: str, keep: int | None) -> str:
    """Make a written folder a checkpoint and prune older ones (`keep` None: none); returns what went wrong, if anything."""
    job = json.dumps(contents.facts.get("job"), sort_keys=True)
    manifest = {
        "step": origin.step,
        "save": origin.save,
        "ranks": origin.ranks,
        "written": round(time.time(), 3),
        "shoal": __version__,
        "job_sha256": hashlib.sha256(job.encode()).hexdigest(),
        **contents.facts,
        "index_sha256": index_sha256,
        "tensors": contents.tensors,
    }
    try:
        commit(aside, manifest)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        return f"checkpoint {aside.with_suffix('')} could not be committed: {error}"
    if keep is not None:
        with suppress(OSError):  # old ones that cannot be deleted are no failure of this one
            prune(aside.parent, keep)
    return ""


def give_up(aside: Path, problem: str, needed_bytes: int) -> str:
    """Clear what was written, else it keeps a full disk full; returns what there is to say."""
    try:
        free = _mib(shutil.disk_usage(aside.parent).free)
    except OSError as error:  # the disk may be gone
        free = f"an unknown number ({error})"
    shutil.rmtree(aside, ignore_errors=True)
    return (
        f"checkpoint {aside.with_suffix('')} could not be written: {problem}; it needs {_mib(needed_bytes)}, "
        f"{free} were free; earlier checkpoints are untouched"
    )


def _mib(count: int) -> str:
    return f"{count:,} bytes ({count / 2**20:,.1f} MiB)"
