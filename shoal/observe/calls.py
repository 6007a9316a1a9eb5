"""`CallFile`: the collectives that a rank called last, in a memory-mapped file that outlives the rank, even a SIGKILL.

What a rank waits for can then be read while its threads are inside C++, while it is stopped, and after native code ended it.
As with `RankStatus`, writing is a few stores into shared memory. In each group calls have numbers, and a sum over all texts until
then: of two ranks of a group the same number has the same sum unless they made other calls.

[Note: torn records] A record begins and ends with its place in the order of all calls, and is believed when both are equal. A
reader that is overtaken just so could still see a mixture: while ranks run, what is found is believed when it is found twice.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shoal.observe.status import mapped

MAGIC = b"SHOALCL1"
RECORDS = 1024
GROUPS = 128
_HEAD = struct.Struct("<8sQ")  # magic, calls
_GROUP = struct.Struct("<64s32s408sQ")  # name, kind, ranks, calls
_COUNT = struct.Struct("<Q")
_RECORD = struct.Struct("<QHQdI120s90sQ")  # place, group, number in it, monotonic, sum, text, line, place
_RECORDS_AT = _HEAD.size + GROUPS * _GROUP.size
SIZE_BYTES = _RECORDS_AT + RECORDS * _RECORD.size


class Group(NamedTuple):
    """The ranks of a collective; `kind` is the mesh's name for them, if they have one."""

    name: str
    kind: str
    ranks: tuple[int, ...]


class Call(NamedTuple):
    """One call of a collective: the `number`-th of its group, from 1, at `time` by the host's monotonic clock."""

    place: int
    group: str
    number: int
    time: float
    sum: int
    text: str
    """operation, reduction, root, type and shape: all that must be equal on all ranks of the group"""
    line: str
    """of the program: `file:line in function`"""


class Calls(NamedTuple):
    """What a reader found: groups by name, how many calls each has had, and the last `RECORDS` calls of all, oldest first."""

    groups: dict[str, Group]
    counts: dict[str, int]
    calls: list[Call]


Noted = tuple[Group, str, str]
"""A call as `CallFile.add` takes it"""


class CallFile:
    """The writer's side, one a rank.

    Example:
        >>> file = CallFile(None)
        >>> file.add(Group("0", "", (0, 1)), "all_reduce sum float32 (4,)", "train.py:3 in step").number
        1
        >>> file.read().calls[0].text
        'all_reduce sum float32 (4,)'
    """

    def __init__(self, path: Path | None) -> None:
        self._memory = mmap.mmap(-1, SIZE_BYTES) if path is None else mapped(path, SIZE_BYTES)
        self._groups: dict[str, list[int]] = {}  # (index, calls, sum)
        self._place = 0
        self._lock = threading.Lock()  # autograd has threads of its own on GPUs
        self._kept: list[Noted] | None = None
        _HEAD.pack_into(self._memory, 0, MAGIC, 0)

    def add(self, group: Group, text: str, line: str) -> Call:
        """Note a call that is about to be made. Of more than `GROUPS` groups, calls of the first are kept."""
        with self._lock:
            if self._kept is not None:
                self._kept.append((group, text, line))
                return Call(0, group.name, 0, time.monotonic(), 0, text, line)
            state = self._groups.get(group.name) or self._add_group(group)
            raw, now = text.encode(), time.monotonic()
            state[1] += 1
            state[2] = zlib.crc32(raw, state[2])
            if state[0] >= GROUPS:
                return Call(0, group.name, state[1], now, state[2], text, line)
            self._place += 1
            _COUNT.pack_into(self._memory, _count_at(state[0]), state[1])
            at = _RECORDS_AT + (self._place - 1) % RECORDS * _RECORD.size
            where = line.encode()[-90:]
            _RECORD.pack_into(
                self._memory, at, self._place, state[0], state[1], now, state[2], raw, where, self._place
            )
            _HEAD.pack_into(self._memory, 0, MAGIC, self._place)
            return Call(self._place, group.name, state[1], now, state[2], text, line)

    @contextmanager
    def kept(self) -> Generator[list[Noted]]:
        """The calls that come while it lasts, as `add` takes them; they are noted nowhere else."""
        found: list[Noted] = []
        with self._lock:
            self._kept = found
        try:
            yield found
        finally:
            with self._lock:
                self._kept = None

    def read(self) -> Calls:
        """What a reader of the file would see."""
        return _unpack(self._memory[:])

    def _add_group(self, group: Group) -> list[int]:
        index = len(self._groups)
        state = self._groups[group.name] = [index, 0, 0]
        if index < GROUPS:
            said = (group.name.encode(), group.kind.encode(), _written(group.ranks).encode())
            _GROUP.pack_into(self._memory, _HEAD.size + index * _GROUP.size, *said, 0)
        return state


def read_calls(path: Path) -> Calls | None:
    """What the rank of a file last called; None if there is no such file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    return _unpack(raw) if len(raw) == SIZE_BYTES and raw[:8] == MAGIC else None


def read_all_calls(folder: Path, ranks: Iterable[int]) -> dict[int, Calls]:
    """What ranks last called, of those that keep it in a run's folder `ranks`."""
    found = {rank: read_calls(folder / f"{rank}.calls") for rank in ranks}
    return {rank: calls for rank, calls in found.items() if calls is not None}


def moved_calls(raw: bytes, monotonic_s: float) -> bytes:
    """The contents of a file of another machine, by the clock of this one, which is ahead by so much."""
    if len(raw) != SIZE_BYTES:
        return raw
    found = bytearray(raw)
    for at in range(_RECORDS_AT, SIZE_BYTES, _RECORD.size):
        place, group, number, when, *rest = _RECORD.unpack_from(found, at)
        if place:
            _RECORD.pack_into(found, at, place, group, number, when + monotonic_s, *rest)
    return bytes(found)


def _unpack(raw: bytes) -> Calls:
    groups: list[Group] = []
    counts: list[int] = []
    for name, kind, ranks, count in _GROUP.iter_unpack(raw[_HEAD.size : _RECORDS_AT]):
        if name[0]:
            groups.append(Group(_text(name), _text(kind), _read(_text(ranks))))
            counts.append(count)
    calls = [
        Call(place, groups[group].name, number, when, total, _text(text), _text(line))
        for place, group, number, when, total, text, line, end in _RECORD.iter_unpack(raw[_RECORDS_AT:])
        if place and place == end and group < len(groups)
    ]
    names = [group.name for group in groups]
    return Calls(dict(zip(names, groups, strict=True)), dict(zip(names, counts, strict=True)), sorted(calls))


def _count_at(index: int) -> int:
    return _HEAD.size + (index + 1) * _GROUP.size - _COUNT.size


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _written(ranks: Sequence[int]) -> str:
    """Ranks in little room: first, last and step where they are even steps apart, as those of a mesh are.

    Example:
        >>> _written([0, 4, 8]), _written([0, 1, 5])
        ('0:8:4', '0,1,5')
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1]}:{step}"
    return ",".join(map(str, ranks))


def _read(text: str) -> tuple[int, ...]:
    if ":" in text:
        first, last, step = map(int, text.split(":"))
        return tuple(range(first, last + 1, step))
    return tuple(int(part) for part in text.split(",") if part)
