"""`Saver`: the other side of saves that ranks do not wait for. It writes what they handed over, also when they are gone.

Ranks copy what they are to write into memory that their launcher holds, one place a rank, and ring. When all have rung, a thread
of the launcher writes the same folder that ranks would have written. A place is used again when its save is done with, so memory
is one copy of the state, and ranks that come too early wait: see `handover`.

[Note: why a thread of the launcher] It outlives every rank, and nothing is left when it ends. It only moves bytes: reading, the
checksum and writing let go of the interpreter, and what it knows of a save is JSON. A process of its own would end with the
launcher as well, and would have to be asked, watched and believed. Where the launcher is not ours, rank 0 has the thread.

[Note: what is no longer wanted] `settle` gives a save up that makes no progress. Its thread may be inside a call that never
returns, and the places are filled anew by other ranks. So a save is of a generation of ranks: before it commits it asks, under
the lock, whether its generation is still there, and what it says later is not put on the board.

On several machines each has a saver, and they write one folder: see `shares`.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from shoal.checkpoint.folder import name_of, start
from shoal.checkpoint.layout import BLOCK_BYTES, HEADER_BYTES, Origin
from shoal.checkpoint.parts import (
    Contents,
    Part,
    give_up,
    require_room,
    seal,
    side_by_side,
    write_index,
    write_parts,
)
from shoal.observe.host import cores
from shoal.resilience.shares import (
    Share,
    Written,
    collect,
    is_open,
    leave_part,
    open_for_others,
    refuse_open,
    require_epoch,
    say_failed,
    wait_until_open,
    wait_until_sealed,
    who_took_over,
)
from shoal.run import CheckpointPolicy, Run

SAVES = "SHOAL_SAVES"
"""the environment variable of a rank that has its `Ways`, as JSON"""
BOARD = struct.Struct("<qqq")
"""saves that are done with in this generation of ranks; blocks written; the generation"""
MOST_THREADS = 16  # that write; a quarter of the cores, since ranks have use for them
POLL_S = 0.05
GIVEN_UP = "the save was given up, since nothing was written for too long or the run ends early"


class Ways(NamedTuple):
    """Paths by which a rank reaches the launcher: any process of this user opens them while the launcher lives."""

    memory: str
    """where the rank puts its file but for the header, and after it the `Handed` as JSON"""
    bell: str
    """a pipe: a `Bell` a line"""
    board: str
    """what the launcher tells: see `BOARD`"""
    name: str
    """in the names of memory and board, and of no others"""


class Bell(NamedTuple):
    """One rank's part of a save is in its memory."""

    generation: int
    rank: int
    step: int
    at: int
    """where its `Handed` begins"""
    length: int
    began: float
    """when the save was due, by the host's monotonic clock"""
    stall_s: float
    """how long the rank was held up"""
    keep: int
    """checkpoints that stay; rank 0's counts"""
    save: str
    """its id, the same from all ranks"""


class Handed(NamedTuple):
    """What there is to know of a rank's memory; `contents` and `needed_bytes`, of all ranks, come from rank 0."""

    parts: list[tuple[str, list[int], list[int], int]]
    """name, offsets, sizes and bytes, in the order of memory, without a gap from byte `HEADER_BYTES` on"""
    contents: tuple[dict[str, Any], dict[str, dict[str, Any]]] | None
    needed_bytes: int


@contextmanager
def saver(
    run: Run,
    policy: CheckpointPolicy,
    ranks: int,
    *,
    deadline_s: float,
    hurry: Callable[[], bool],
    say: Callable[[str], None],
) -> Generator[Saver | None]:
    """A saver while the block runs, for ranks that save as they go and a system that has such memory.

    At the end, saves in flight are waited for.

    Args:
        ranks: as many as this machine can have.
        deadline_s: a save of which nothing is written for so long is given up.
        hurry: asked while it is waited for: true gives it up, too.
        say: told what went wrong.
    """
    if not (ranks and wanted(policy)):
        yield None
        return
    made = Saver(run, ranks, deadline_s, hurry, say)
    try:
        yield made
    finally:
        made.close()


def wanted(policy: CheckpointPolicy) -> bool:
    """Whether saves are to be handed over, and this system has memory for it."""
    return policy.asynchronous and policy.every > 0 and sys.platform == "linux"


class Saver:
    """Writes checkpoints that all ranks of a launch have handed over."""

    def __init__(
        self,
        run: Run,
        ranks: int,
        deadline_s: float,
        hurry: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._say = run, say
        self._share = Share(0, ranks, ranks, (0,), None)
        self._deadline_s, self._hurry = deadline_s, hurry
        self._name = f"shoal-save-{secrets.token_hex(8)}"
        self._memories = [os.memfd_create(f"{self._name}-{rank}") for rank in range(ranks)]
        self._board = os.memfd_create(f"{self._name}-board")
        self._hears, self._rings = os.pipe()
        self._changed = threading.Condition()  # guards what follows
        self._generation = self._done = self._blocks = self._asked = self._answered = 0
        self._writing = False
        self._leaving = threading.Lock()  # one at a time leaves what this machine has written
        self._show()
        self._thread = threading.Thread(target=self._listen, name="saver", daemon=True)
        self._thread.start()

    def share(self, share: Share) -> tuple[Ways, ...]:
        """Of which ranks saves are from now on; the ways of those that are here. All of before have ended, and are settled."""
        with self._changed:
            self._share = share
        for memory in self._memories[share.ranks :]:
            os.ftruncate(memory, 0)  # of ranks that there were
        return self.ways[: share.ranks]

    @property
    def ways(self) -> tuple[Ways, ...]:
        """For each rank that there can be."""
        here = f"/proc/{os.getpid()}/fd"
        return tuple(
            Ways(f"{here}/{memory}", f"{here}/{self._rings}", f"{here}/{self._board}", self._name)
            for memory in self._memories
        )

    def settle(self, patience_s: float = float("inf")) -> None:
        """When all ranks here have ended: wait until what all of them handed over is written, and forget what only some did.

        A save that makes no progress, or that nobody wants to wait for any longer, is given up: it never becomes a checkpoint.
        """
        began = time.monotonic()
        with self._changed:
            self._asked += 1
            asked, blocks, since = self._asked, self._blocks, began
        os.write(self._rings, b'"settle"\n')
        with self._changed:
            while self._answered < asked:
                self._changed.wait(POLL_S)
                if self._blocks != blocks:
                    blocks, since = self._blocks, time.monotonic()
                now = time.monotonic()
                is_late = now - since > self._deadline_s or now - began > patience_s
                if is_late or (self._writing and self._hurry()):
                    break
            lost = self._writing
            self._generation, self._done = self._generation + 1, 0
            self._show()
        if self._share.epoch is not None and not self._share.heads:
            with self._leaving:
                refuse_open(self._run, self._share, "its ranks have ended")
        if lost:
            with suppress(OSError):  # a terminal that is gone
                self._say(f"NOT saved: {GIVEN_UP}")

    def close(self) -> None:
        """Settle and end. What a thread that hangs still has open is left to it."""
        self.settle()
        os.write(self._rings, b'"end"\n')
        self._thread.join(POLL_S if self._answered < self._asked else None)
        if not self._thread.is_alive():
            for file in (*self._memories, self._board, self._rings):
                os.close(file)

    def _listen(self) -> None:
        rung: dict[int, Bell] = {}
        with os.fdopen(self._hears) as lines:
            for line in lines:
                said = json.loads(line)
                if said == "end":
                    return
                if said == "settle":
                    rung.clear()
                    with self._changed:
                        self._answered += 1
                        self._changed.notify_all()
                    continue
                bell = Bell(*said)
                if bell.generation == self._generation:  # else of a rank that took its time to die
                    rung[bell.rank] = bell
                if len(rung) == self._share.ranks:
                    self._save([rung.pop(rank) for rank in self._share.numbers], self._share)

    def _save(self, bells: list[Bell], share: Share) -> None:
        generation, step, began = bells[0].generation, bells[0].step, bells[0].began
        with self._changed:
            self._writing = generation == self._generation
        try:
            problem = (self._write if share.heads else self._write_part)(bells, share)
        except Exception as error:  # ranks wait for an answer, and whatever went wrong is one
            problem = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            if problem and share.heads:  # the machine of rank 0 tells of all
                self._say(f"NOT saved: {problem}")
                self._run.event("save failed", step=step, reason=problem)
            elif share.heads:
                path, seconds = self._run.checkpoints / name_of(step), time.monotonic() - began
                stall_s = round(bells[0].stall_s, 4)
                self._run.event("save", step=step, path=str(path), seconds=round(seconds, 3), stall_s=stall_s)
        with self._changed:
            self._writing = False
            if generation == self._generation:
                self._done += 1
                self._show()

    def _write(self, bells: list[Bell], share: Share) -> str:
        """Returns what went wrong, if anything."""
        head, step = bells[0], bells[0].step
        handed = self._handed(head, share)
        assert handed.contents is not None
        contents, needed_bytes = Contents(*handed.contents), handed.needed_bytes
        try:
            require_epoch(self._run, share)
            aside = start(self._run.checkpoints, step)
        except OSError as error:
            if share.others and not who_took_over(self._run, share):
                say_failed(self._run.checkpoints / f"{name_of(step)}.tmp", share, head.save)
            return f"no checkpoint can be written into {self._run.checkpoints}: {error}"

        try:
            if share.epoch is not None:
                open_for_others(aside, share, head.save)
            require_room(aside, needed_bytes)
            written = self._write_files(aside, bells, share)
            if share.epoch is not None:
                still, moved = partial(self._require, head), partial(self._count, head.generation)
                written += collect(aside, share, head.save, still, moved, self._deadline_s)
            index_sha256 = write_index(aside, contents.tensors, written)
            require_epoch(self._run, share)
            self._go_ahead(head.generation)
        except Exception as error:
            if who_took_over(self._run, share) and not is_open(aside, share, head.save):
                return _told(error)  # the folder is of who leads now
            said = give_up(aside, _told(error), needed_bytes)
            if share.others and not who_took_over(self._run, share):
                say_failed(aside, share, head.save)
            return said
        return seal(aside, Origin(head.save, step, 0, share.size), contents, index_sha256, head.keep)

    def _write_part(self, bells: list[Bell], share: Share) -> str:
        """The same where rank 0 is on another machine, which seals the folder."""
        first = bells[0]
        aside = self._run.checkpoints / f"{name_of(first.step)}.tmp"
        try:
            wait_until_open(aside, share, first.save, partial(self._require, first), self._deadline_s)
            written = self._write_files(aside, bells, share)
            self._go_ahead(first.generation)
            with self._leaving:
                leave_part(aside, share, first.save, written)
        except Exception as error:  # who collects is to know, and a full disk to have room to say so
            with suppress(OSError), self._leaving:
                if is_open(aside, share, first.save):
                    for rank in share.numbers:
                        (aside / Origin(first.save, first.step, rank, share.size).file).unlink(
                            missing_ok=True
                        )
                    leave_part(aside, share, first.save, [], _told(error))
            return _told(error)
        still, moved = partial(self._require, first), partial(self._count, first.generation)
        with suppress(OSError):  # the ranks have ended meanwhile
            wait_until_sealed(aside, share, first.save, still, moved, self._deadline_s)
        return ""

    def _write_files(self, aside: Path, bells: list[Bell], share: Share) -> Written:
        threads = max(1, min(MOST_THREADS, int(cores() / 4)))

        def write(bell: Bell) -> Written:
            parts = self._parts(bell, share)
            origin = Origin(bell.save, bell.step, bell.rank, share.size)
            return write_parts(aside, origin, parts, max(1, threads // share.ranks))

        return list(chain.from_iterable(side_by_side(write, bells, threads)))

    def _memory_of(self, bell: Bell, share: Share) -> int:
        return self._memories[bell.rank - share.first]

    def _handed(self, bell: Bell, share: Share) -> Handed:
        return Handed(*json.loads(os.pread(self._memory_of(bell, share), bell.length, bell.at)))

    def _parts(self, bell: Bell, share: Share) -> Iterator[Part]:
        """A rank's parts, read from its memory block by block into a few megabytes, which stay in the core's cache."""
        memory, table = self._memory_of(bell, share), self._handed(bell, share).parts

        def blocks(at: int, size: int) -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
            for first in range(at, at + size, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, at + size - first)]
                if os.preadv(memory, [block], first) != len(block):
                    raise OSError(f"rank {bell.rank} handed over less than it said")
                yield block
                self._count(bell.generation)

        at = HEADER_BYTES
        for name, offsets, sizes, size in table:
            yield Part(name, tuple(offsets), tuple(sizes), size, blocks(at, size))
            at += size

    def _count(self, generation: int) -> None:
        """A block is written: ranks that wait see that there is progress."""
        with self._changed:
            _require(generation == self._generation)
            self._blocks += 1
            self._show()

    def _require(self, bell: Bell) -> None:
        with self._changed:
            _require(bell.generation == self._generation)

    def _go_ahead(self, generation: int) -> None:
        """From here on memory is not read any more, and the save can no longer be given up."""
        with self._changed:
            _require(generation == self._generation)
            self._writing = False

    def _show(self) -> None:
        os.pwrite(self._board, BOARD.pack(self._done, self._blocks, self._generation), 0)


def _require(wanted: bool) -> None:
    if not wanted:
        raise OSError(GIVEN_UP)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def ways_of(text: str | None) -> Ways | None:
    """What `SAVES` says, if it is set."""
    return None if text is None else Ways(*json.loads(text))
