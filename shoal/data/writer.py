"""Writes token shards: documents go in one by one, files and the folder appear when they are complete."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from shoal.data.format import ShardInfo, SplitInfo

POLL_S = 0.1


class SplitWriter:
    """Appends documents to the shards of one split; a shard is closed after `shard_tokens` tokens.

    Example:
        >>> writer = SplitWriter(Path("."), "train", "uint16", shard_tokens=1 << 27)
        >>> writer.add(np.array([5, 6, 256]))
        >>> writer.close().tokens
        3
    """

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shards: list[ShardInfo] = []
        self._file: BinaryIO | None = None
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._starts = array("Q")
        self._tokens = 0
        self._digest = hashlib.sha256()

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append one document, its end-of-text token included: (tokens,) ids."""
        if self._file is None:
            self._file = (self._folder / f"{self._name}.bin").open("wb")
        raw = tokens.astype(self._dtype).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._starts.append(self._tokens)
        self._tokens += len(tokens)
        if self._tokens >= self._shard_tokens:
            self._end_shard(self._file)

    def close(self) -> SplitInfo:
        """Finish the last shard and tell what was written."""
        if self._file is not None:
            self._end_shard(self._file)
        tokens, documents = sum(s.tokens for s in self._shards), sum(s.documents for s in self._shards)
        return SplitInfo(tokens, documents, tuple(self._shards))

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self._shards):05d}"

    def _end_shard(self, file: BinaryIO) -> None:
        file.close()
        starts = np.array(self._starts, dtype="<u8").tobytes()
        (self._folder / f"{self._name}.idx").write_bytes(starts)
        starts_digest = hashlib.sha256(starts).hexdigest()
        self._shards.append(
            ShardInfo(self._name, self._tokens, len(self._starts), self._digest.hexdigest(), starts_digest)
        )
        self._file = None
        self._begin_shard()


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """A folder to write in that takes the name `folder` when the block ends without an error.

    Call it with `folder_lock` held. What a killed process left behind is removed first.

    Raises:
        ValueError: something that is no empty folder is in the way.
    """
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder.parent / f".{folder.name}.partial-{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        yield aside
        for path in aside.iterdir():
            _flush(path)
        _flush(aside)
        aside.rename(folder)
        _flush(folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ValueError(
                f"{folder} is in the way: it holds something else. Choose another folder."
            ) from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def folder_lock(folder: Path, deadline_s: float) -> Generator[None]:
    """Hold the one right to write `folder`. The lock ends with the process that holds it, however it ends.

    Raises:
        TimeoutError: another process still held it after `deadline_s` seconds. Names the lock file and
            process.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    with path.open("a+") as file:
        _acquire(file.fileno(), path, deadline_s)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _acquire(descriptor: int, path: Path, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                holder = path.read_text() or "unknown"
                raise TimeoutError(
                    f"{path} is still held by process {holder} after {deadline_s:.0f} s: it is preparing the "
                    "same folder. Wait for it, stop it, or prepare another folder."
                ) from None
            time.sleep(POLL_S)
        else:
            return


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
