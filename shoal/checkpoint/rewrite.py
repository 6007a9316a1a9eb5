"""`rewrite`: the same checkpoint in another number of files. No plan needs that; file systems and people who copy it may."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from shoal.checkpoint.folder import Checkpoint, CheckpointError, list_checkpoints, start
from shoal.checkpoint.layout import HEADER_BYTES, Index, Origin, Stored
from shoal.checkpoint.parts import Contents, Part, give_up, require_room, seal, write_index, write_parts
from shoal.checkpoint.plain import index_of, read_whole
from shoal.checkpoint.read import Files
from shoal.checkpoint.write import bytes_of
from shoal.run import Run

OF_A_SAVE = (
    "format",
    "step",
    "save",
    "ranks",
    "written",
    "shoal",
    "job_sha256",
    "index_sha256",
    "tensors",
    "files",
)
"""what a manifest says of one save alone; the rest goes along"""


class Rows(NamedTuple):
    """Rows of a tensor's first dim; of a tensor without dims its one element."""

    name: str
    rows: range


def rewrite(checkpoint: Checkpoint, out: Path, files: int) -> Path:
    """Write a checkpoint of a run into the folder of another one, as if so many ranks had saved it; returns its folder.

    Each byte is checked as it is read. It takes the memory of the largest tensor, twice if that lies in one piece.

    Args:
        out: a run directory, which has no checkpoint of this step; it may be new.
        files: how many files of tensors; about as large as each other, to a row of a tensor.

    Raises:
        ValueError: such a checkpoint is there already, the run goes on just now, or `files` is not positive.
        DamagedCheckpointError: the checkpoint is not what was written.
        CheckpointError: it could not be written; nothing is left of it then.
    """
    if files < 1:
        raise ValueError(f"{files} files: expected at least 1")
    index, run = index_of(checkpoint), Run(out)
    run.create()
    with run.locked():
        for there in list_checkpoints(run.checkpoints)[0]:
            if there.step == checkpoint.step:
                raise ValueError(f"{str(there.path)!r} is there already; choose another run directory")
        try:
            aside = start(run.checkpoints, checkpoint.step)
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written into {run.checkpoints}: {error}") from error
        try:
            _write(checkpoint, index, aside, files)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return aside.with_suffix("")


def _write(checkpoint: Checkpoint, index: Index, aside: Path, files: int) -> None:
    needed_bytes = files * HEADER_BYTES + sum(map(_bytes, index.values()))
    save, written = secrets.token_hex(16), []
    try:
        require_room(aside, needed_bytes)
        with Files(checkpoint) as sources:
            tensors = _Tensors(checkpoint, index, sources)
            for number, share in enumerate(shares(index, files)):
                parts = [_part(index[rows.name], rows, tensors) for rows in share]
                written += write_parts(aside, Origin(save, checkpoint.step, number, files), parts)
        index_sha256 = write_index(aside, checkpoint.manifest["tensors"], written)
    except OSError as error:
        raise CheckpointError(give_up(aside, str(error), needed_bytes)) from error
    facts = {key: value for key, value in checkpoint.manifest.items() if key not in OF_A_SAVE}
    contents = Contents(facts, checkpoint.manifest["tensors"])
    if problem := seal(aside, Origin(save, checkpoint.step, 0, files), contents, index_sha256, None):
        raise CheckpointError(problem)


def shares(index: Index, files: int) -> list[list[Rows]]:
    """What goes into each file: tensors in a row, the widest types first, cut between rows where a file is full.

    Example:
        >>> import torch
        >>> a, b = (Stored(torch.float32, shape, ()) for shape in ((3, 2), (2, 2)))
        >>> [[(rows.name, [*rows.rows]) for rows in share] for share in shares({"a": a, "b": b}, 2)]
        [[('a', [0, 1])], [('a', [2]), ('b', [0, 1])]]
    """
    found: list[list[Rows]] = [[] for _ in range(files)]
    total, before = sum(map(_bytes, index.values())), 0
    for name in sorted(index, key=lambda name: (-index[name].dtype.itemsize, name)):
        count = index[name].shape[0] if index[name].shape else 1
        size = _bytes(index[name])
        cuts = [_cut(total * number / files - before, size, count) for number in range(files)] + [count]
        for share, (first, last) in zip(found, pairwise(cuts), strict=True):
            if first < last:
                share.append(Rows(name, range(first, last)))
        before += size
    return found


def _cut(at: float, size: int, rows: int) -> int:
    """The row nearest to a byte that a tensor may not have."""
    return max(0, min(rows, round(at * rows / size))) if size else 0


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


def _part(stored: Stored, rows: Rows, tensors: _Tensors) -> Part:
    shape = stored.shape
    offsets = (rows.rows.start, *(0 for _ in shape[1:])) if shape else ()
    sizes = (len(rows.rows), *shape[1:]) if shape else ()
    size = math.prod(sizes) * stored.dtype.itemsize
    return Part(rows.name, offsets, sizes, size, tensors.blocks(rows))


class _Tensors:
    """Reads tensors, of which it keeps the last: its rows may go into several files."""

    def __init__(self, checkpoint: Checkpoint, index: Index, files: Files) -> None:
        self._checkpoint, self._index, self._files = checkpoint, index, files
        self._name = ""
        self._tensor: Tensor | None = None

    def blocks(self, rows: Rows) -> Iterator[memoryview]:
        if self._tensor is None or self._name != rows.name:
            self._tensor = None  # before the next one takes as much
            self._name = rows.name
            self._tensor = read_whole(self._checkpoint, self._files, rows.name, self._index[rows.name])
        whole = self._tensor
        yield from bytes_of(whole[rows.rows.start : rows.rows.stop] if whole.dim() else whole)
