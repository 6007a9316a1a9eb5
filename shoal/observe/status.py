"""`RankStatus`: where a rank is, in a small memory-mapped file that outlives the rank, even a SIGKILL.

Writing is a few stores into shared memory: no system call, no flush. The file is for the machine it is on
and those that share its file system; it need not survive a power cut.

[Note: torn reads] A writer makes the sequence number odd, writes, and makes it even. A reader believes a copy
whose number is even when a second copy is equal to it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from pathlib import Path
from typing import Literal, NamedTuple

State = Literal["running", "finished", "failed"]

STATES: tuple[State, ...] = ("running", "finished", "failed")
SIZE_BYTES = 2048
_WHY_AT = 256  # why a rank failed, from here to the end: kept where no disk that is full can be in the way
WHY_BYTES = SIZE_BYTES - _WHY_AT
_SEQUENCE = struct.Struct("<8sQ")  # magic, sequence number
_BODY = struct.Struct(
    "<iiqBdd32s64sd"
)  # rank, pid, step, state, wall, monotonic, phase, host, seconds in DATA
_MAGIC = b"SHOALST1"
DATA = "data"  # the phase in which a rank waits for its loader


class Status(NamedTuple):
    """What a rank last said; `changed` is in seconds since 1970, `monotonic` since the host started."""

    rank: int
    pid: int
    host: str
    step: int
    phase: str
    state: State
    changed: float
    monotonic: float
    data_s: float = 0.0
    """seconds in phases `DATA` that have ended"""
    why: str = ""
    """what a rank that failed said of it"""

    def describe(self) -> str:
        """`in step 3, phase eval`."""
        if self.state == "finished":
            return f"finished after step {self.step}"
        return f"in step {self.step}, phase {self.phase}"


class RankStatus:
    """The writer's side, one a rank. Without a path it keeps the same state in memory that nobody else sees.

    Example:
        >>> status = RankStatus(None, rank=0)
        >>> status.enter("eval", step=3)
        >>> status.read().describe()
        'in step 3, phase eval'
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self.rank = rank
        self._host = socket.gethostname().encode()[:64]
        self._sequence = 0
        self._phase, self._step = "start", 0
        self._changed, self._data_s = time.monotonic(), 0.0
        self._memory = mmap.mmap(-1, SIZE_BYTES) if path is None else mapped(path, SIZE_BYTES)
        self._write("running")

    def enter(self, phase: str, step: int) -> None:
        """Say that this rank now is in `phase` (32 bytes are kept) of optimizer step `step`."""
        if self._phase == DATA:
            self._data_s += time.monotonic() - self._changed
        self._phase, self._step = phase, step
        self._write("running")

    def finish(self, step: int) -> None:
        """Say that this rank is done, after `step` optimizer steps."""
        self._step = step
        self._write("finished")

    def fail(self, why: str = "") -> None:
        """Say that this rank failed, in the phase and step where it is, and why (`WHY_BYTES` of UTF-8 are kept)."""
        self._write("failed", why.encode()[:WHY_BYTES])

    def read(self) -> Status:
        """What a reader of the file would see."""
        status = _unpack(self._memory[:])
        assert status is not None, "a writer does not interrupt itself"
        return status

    def _write(self, state: State, why: bytes = b"") -> None:
        memory, sequence, self._changed = self._memory, self._sequence, time.monotonic()
        _SEQUENCE.pack_into(memory, 0, _MAGIC, sequence + 1)
        _BODY.pack_into(
            memory,
            _SEQUENCE.size,
            self.rank,
            os.getpid(),
            self._step,
            STATES.index(state),
            time.time(),
            self._changed,
            self._phase.encode()[:32],
            self._host,
            self._data_s,
        )
        if why:
            memory[_WHY_AT : _WHY_AT + len(why)] = why
        _SEQUENCE.pack_into(memory, 0, _MAGIC, sequence + 2)
        self._sequence = sequence + 2


def read_status(path: Path) -> Status | None:
    """What the rank of a status file last said; None if there is no such file, or nothing in it yet.

    Raises:
        ValueError: the file is something else.
    """
    raw = b""
    for _ in range(100):
        try:
            raw, before = path.read_bytes(), raw
        except FileNotFoundError:
            return None
        if raw[:8].strip(b"\0") and raw[:8] != _MAGIC:
            raise ValueError(
                f"{path} is not a rank's status file: it begins with {raw[:8]!r}, not {_MAGIC!r}"
            )
        if raw == before and (status := _unpack(raw)) is not None:
            return status
    return _unpack(raw, torn=True)  # its writer was killed inside a write


def moved_status(raw: bytes, wall_s: float, monotonic_s: float) -> bytes:
    """The contents of a status file of another machine, by the clocks of this one, which are ahead by so much."""
    if len(raw) < SIZE_BYTES:
        return raw
    fields = list(_BODY.unpack_from(raw, _SEQUENCE.size))
    fields[4] += wall_s
    fields[5] += monotonic_s
    found = bytearray(raw)
    _BODY.pack_into(found, _SEQUENCE.size, *fields)
    return bytes(found)


def mapped(path: Path, size_bytes: int) -> mmap.mmap:
    """A fresh file of zeros in place of any older one, whose readers keep what they have mapped."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(bytes(size_bytes))
    with aside.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size_bytes)
    aside.replace(path)
    return memory


def _unpack(raw: bytes, torn: bool = False) -> Status | None:
    """The status in a copy of the memory; None before the first write, and inside one unless `torn`."""
    if len(raw) < SIZE_BYTES:
        return None
    magic, sequence = _SEQUENCE.unpack_from(raw)
    if magic != _MAGIC or (sequence % 2 and not torn):
        return None
    rank, pid, step, state, wall, monotonic, phase, host, data_s = _BODY.unpack_from(raw, _SEQUENCE.size)
    why = _text(raw[_WHY_AT:SIZE_BYTES])
    return Status(rank, pid, _text(host), step, _text(phase), STATES[state % 3], wall, monotonic, data_s, why)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")
