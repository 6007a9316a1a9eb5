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
from itertools import chain
from typing import Any, NamedTuple

from shoal.checkpoint.folder import name_of, start
from shoal.checkpoint.layout import BLOCK_BYTES, HEADER_BYTES, Origin, Piece
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
    return policy.asynchronous is not False and policy.every > 0 and sys.platform == "linux"


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
        self._run, self._ranks, self._say = run, ranks, say
        self._deadline_s, self._hurry = deadline_s, hurry
        self._name = f"shoal-save-{secrets.token_hex(8)}"
        self._memories = [os.memfd_create(f"{self._name}-{rank}") for rank in range(ranks)]
        self._board = os.memfd_create(f"{self._name}-board")
        self._hears, self._rings = os.pipe()
        self._changed = threading.Condition()  # guards what follows
        self._generation = self._done = self._blocks = self._asked = self._answered = 0
        self._writing = False
        self._show()
        self._thread = threading.Thread(target=self._listen, name="saver", daemon=True)
        self._thread.start()

    @property
    def ways(self) -> tuple[Ways, ...]:
        """For each rank."""
        here = f"/proc/{os.getpid()}/fd"
        return tuple(
            Ways(f"{here}/{memory}", f"{here}/{self._rings}", f"{here}/{self._board}", self._name)
            for memory in self._memories
        )

    def settle(self) -> None:
        """When all ranks have ended: wait until what all of them handed over is written, and forget what only some did.

        A save that makes no progress, or that nobody wants to wait for, is given up: it then never becomes a checkpoint.
        """
        with self._changed:
            self._asked += 1
            asked, blocks, since = self._asked, self._blocks, time.monotonic()
        os.write(self._rings, b'"settle"\n')
        with self._changed:
            while self._answered < asked:
                self._changed.wait(POLL_S)
                if self._blocks != blocks:
                    blocks, since = self._blocks, time.monotonic()
                is_late = time.monotonic() - since > self._deadline_s
                if is_late or (self._writing and self._hurry()):
                    break
            lost = self._writing
            self._generation, self._done = self._generation + 1, 0
            self._show()
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
                if len(rung) == self._ranks:
                    self._save([rung.pop(rank) for rank in range(self._ranks)])

    def _save(self, bells: list[Bell]) -> None:
        generation, step, began = bells[0].generation, bells[0].step, bells[0].began
        with self._changed:
            self._writing = generation == self._generation
        try:
            problem = self._write(bells, generation)
        except Exception as error:  # ranks wait for an answer, and whatever went wrong is one
            problem = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            if problem:
                self._say(f"NOT saved: {problem}")
                self._run.event("save failed", step=step, reason=problem)
            else:
                path, seconds = self._run.checkpoints / name_of(step), time.monotonic() - began
                stall_s = round(bells[0].stall_s, 4)
                self._run.event("save", step=step, path=str(path), seconds=round(seconds, 3), stall_s=stall_s)
        with self._changed:
            self._writing = False
            if generation == self._generation:
                self._done += 1
                self._show()

    def _write(self, bells: list[Bell], generation: int) -> str:
        """Returns what went wrong, if anything."""
        step, save = bells[0].step, secrets.token_hex(16)
        origins = [Origin(save, step, rank, self._ranks) for rank in range(self._ranks)]
        handed = [self._handed(bell) for bell in bells]
        assert handed[0].contents is not None
        contents, needed_bytes = Contents(*handed[0].contents), handed[0].needed_bytes
        try:
            aside = start(self._run.checkpoints, step)
        except OSError as error:
            return f"no checkpoint can be written into {self._run.checkpoints}: {error}"

        def write(origin: Origin) -> list[tuple[str, Piece]]:
            parts = self._parts(origin.rank, handed[origin.rank].parts, generation)
            return write_parts(aside, origin, parts, max(1, threads // self._ranks))

        threads = max(1, min(MOST_THREADS, int(cores() / 4)))
        try:
            require_room(aside, needed_bytes)
            written = side_by_side(write, origins, threads)
            index_sha256 = write_index(aside, contents.tensors, chain.from_iterable(written))
            self._go_ahead(generation)
        except OSError as error:
            return give_up(aside, str(error), needed_bytes)
        return seal(aside, origins[0], contents, index_sha256, bells[0].keep)

    def _handed(self, bell: Bell) -> Handed:
        return Handed(*json.loads(os.pread(self._memories[bell.rank], bell.length, bell.at)))

    def _parts(
        self, rank: int, table: list[tuple[str, list[int], list[int], int]], generation: int
    ) -> Iterator[Part]:
        """A rank's parts, read from its memory block by block into a few megabytes, which stay in the core's cache."""

        def blocks(at: int, size: int) -> Iterator[memoryview]:
            buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
            for first in range(at, at + size, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, at + size - first)]
                if os.preadv(self._memories[rank], [block], first) != len(block):
                    raise OSError(f"rank {rank} handed over less than it said")
                yield block
                self._count(generation)

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


def ways_of(text: str | None) -> Ways | None:
    """What `SAVES` says, if it is set."""
    return None if text is None else Ways(*json.loads(text))
