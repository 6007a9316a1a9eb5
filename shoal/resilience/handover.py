"""`HandOver`: a rank's side of a save that it does not wait for: it copies what it is to write into memory of who writes it.

Who writes which piece is planned with the other ranks once, by torch's distributed checkpoint (DCP), as for any save: names,
shapes and places of the state are the same at every step. After that a save needs no word between ranks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from shoal.checkpoint.store import plan_save
from shoal.checkpoint.write import Recorder, item_bytes
from shoal.observe.host import memory
from shoal.parallel.host import Pause
from shoal.resilience.aside import Aside, sizes_of
from shoal.resilience.copies import Copies, Making
from shoal.resilience.saver import BOARD, SAVES, Bell, Handed, Saver, Ways, wanted, ways_of
from shoal.run import CheckpointPolicy, Run
from shoal.world import DeadlineError, World, WorldError

POLL_S = 0.002
SPARE = 0.05  # of the host's memory, which a copy of the state must leave free
SETTLED = 3  # updates; when the last of them is due, steps have had all memory of the device that they need
Signature = dict[str, tuple[torch.Size, torch.dtype]]


class SaveStuckError(RuntimeError):
    """The disk takes nothing of a save, and gives no error: starting again would wait for it again."""


class HandOver:
    """Hands saves over to a `Saver`, of the launcher or of rank 0."""

    def __init__(self, ways: Ways, world: World) -> None:
        self.problem = ""
        """why saves cannot be handed over, once that is known: ranks then write themselves"""
        self._ways, self._world = ways, world
        self._bell = self._board = -1
        self._generation = 0
        self._aside, self._sizes = Aside(world.device), list[int]()
        self._updates = 0  # until there is room for copies
        self._planned: Signature = {}
        self._making: Making | None = None
        self._copies: Copies | None = None
        self._handed = 0
        self._token = ""
        """of which the ids of saves are made"""

    @property
    def overlaps(self) -> bool:
        """Whether the next save only asks the device for copies."""
        return self._copies is not None and self._copies.on_gpu

    @property
    def copies(self) -> list[Tensor]:
        """On the device, of what is being saved."""
        return self._aside.copies

    def wait(self, on_progress: Callable[[], None] = lambda: None) -> float:
        """Wait until the last save is a checkpoint, or has failed; returns the seconds that took, 0 if it was so already.

        Raises:
            SaveStuckError: nothing is written any more.
        """
        if self._copies is None:
            return 0.0
        self._copies.join()
        limit = self._world.deadline.total_seconds()
        began = moved = time.monotonic()
        done, blocks, _ = self._read()
        if done == self._handed:
            return 0.0
        while done < self._handed:
            time.sleep(POLL_S)
            before = blocks
            done, blocks, _ = self._read()
            if blocks != before:
                moved = time.monotonic()
                on_progress()
            if time.monotonic() - moved > limit:
                raise SaveStuckError(
                    "the last save does not come to an end: nothing has been written for "
                    f"{limit:g} s (run.deadline_s); look at the disk of run.dir"
                )
        return time.monotonic() - began

    def take(
        self, done: int, state: dict[str, Tensor], facts: dict[str, Any], began: float, *, keep: int
    ) -> bool:
        """Hand over the state after `done` steps; the save before is done with. False, on all ranks, if there is no room for it.

        The first time this is collective.

        Args:
            state: the same tensors at every step. facts: for the manifest.
            began: when the save was due, by the monotonic clock. keep: checkpoints that stay.

        Raises:
            CheckpointError: on all ranks: the state holds something that is no tensor, or cannot be planned.
        """
        if self._copies is None and not self.problem:
            self._copies = self._made(state)
        if self._copies is None:
            return False
        self._handed += 1
        self._copies.tell(facts | {"torch": torch.__version__})
        self._copies.fill(state, lambda stall_s: self._ring(done, began, stall_s, keep), began)
        return True

    def close(self) -> None:
        """Let go of what the launcher holds."""
        self._give_up_making()
        self._copies = None
        for file in (self._bell, self._board):
            if file >= 0:
                os.close(file)

    def before_update(self) -> None:
        """Have the device copy what is being copied before it changes it; told at every step."""
        if self._copies is not None:
            self._copies.before_update()
        elif self._sizes and not self.problem:
            self._updates += 1
            if self._updates == SETTLED:
                self._aside.keep_room(self._sizes)

    def get_ready(self, state: dict[str, Tensor], *, patient: bool = True) -> None:
        """Plan how this state is saved, and begin to make the memory for it, which takes seconds; `problem` if there is none.

        Collective.

        Args:
            patient: the device is in use meanwhile; else its making ends earlier.

        Raises:
            CheckpointError: on all ranks, as `take` does.
        """
        planned, resolve = plan_save(state, self._world)
        self._planned = _signature(state)
        try:
            self._world.barrier("hand saves over", self._lack_of_memory(planned))  # before any takes some
        except DeadlineError:
            raise
        except WorldError as error:
            self.problem = f"saves hold the ranks up: {error}"
            return
        self._token = self._world.broadcast_text(secrets.token_hex(16) if self._world.is_main else None)
        contents = ({}, planned.tensors) if self._world.is_main else None
        handed = Handed(_table(planned.items), contents, planned.needed_bytes)
        if patient:
            self._sizes = sizes_of(resolve(state))

        def make(pause: Pause) -> Copies:
            _require_same(self._ways)
            places = planned.items, resolve, handed, self._aside
            return Copies(self._ways.memory, *places, self._world.device, pause)

        self._making = Making(make)

    def _made(self, state: dict[str, Tensor]) -> Copies | None:
        """What `get_ready` began, when all ranks have it; None, and why in `problem`, if one cannot."""
        if self._making is None or self._has_changed(state):
            self._give_up_making()
            self.get_ready(state, patient=False)
        if self._making is None:
            return None
        made, lack = None, ""
        try:
            made = self._making.wait()
            self._bell = os.open(self._ways.bell, os.O_WRONLY)
            self._board = os.open(self._ways.board, os.O_RDONLY)
            self._generation = self._read()[2]
        except Exception as error:  # whatever it is, other ranks must not wait for this one
            why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            lack = f"rank {self._world.rank} cannot have the memory to hand over in: {why}"
        self._making = None
        try:
            self._world.barrier("hand saves over", lack)
        except DeadlineError:
            raise
        except WorldError as error:
            self.problem = f"saves hold the ranks up: {error}"
            return None
        return made

    def _has_changed(self, state: dict[str, Tensor]) -> bool:
        """Whether some rank has another state than when it got ready, as of a buffer that the first forward made. Collective."""
        changed = "" if _signature(state) == self._planned else f"rank {self._world.rank} has another state"
        try:
            self._world.barrier("the state that is saved", changed)
        except DeadlineError:
            raise
        except WorldError:
            return True
        return False

    def _give_up_making(self) -> None:
        if self._making is not None:
            self._making.stop()
        self._making = None

    def _ring(self, done: int, began: float, stall_s: float, keep: int) -> None:
        assert self._copies is not None
        save = hashlib.sha256(f"{self._token} {done} {self._handed}".encode()).hexdigest()[:32]
        handed_at = self._copies.handed_at
        bell = Bell(self._generation, self._world.rank, done, *handed_at, began, stall_s, keep, save)
        os.write(self._bell, (json.dumps(bell) + "\n").encode())  # in one piece, as pipes take so few bytes

    def _read(self) -> tuple[int, int, int]:
        return BOARD.unpack(os.pread(self._board, BOARD.size, 0))

    def _lack_of_memory(self, planned: Recorder) -> str:
        """What to say if this host has no room for a copy of what its ranks save, told by one of them; empty if it has."""
        if self._world.local_rank != 0:
            return ""
        needed_bytes, now = planned.needed_bytes, memory()
        if self._world.size > self._world.local_size:  # each machine has its own part, about so much
            needed_bytes = self._world.local_size * sum(map(item_bytes, planned.items))
        try:
            there = self._world.local_size * Path(self._ways.memory).stat().st_blocks * 512  # of ranks before
        except OSError as error:
            return str(error)
        if now is None or now.used_bytes + needed_bytes - there <= now.total_bytes * (1 - SPARE):
            return ""
        return (
            f"a copy of what they save needs {needed_bytes:,} bytes of host memory, and "
            f"{now.total_bytes - now.used_bytes:,} of {now.total_bytes:,} are free (checkpoint.asynchronous)"
        )


def _signature(state: dict[str, Tensor]) -> Signature:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def _table(items: list[WriteItem]) -> list[tuple[str, list[int], list[int], int]]:
    found = []
    for item in items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        found.append((item.index.fqn, list(chunk.offsets), list(chunk.sizes), item_bytes(item)))
    return found


def _require_same(ways: Ways) -> None:
    """The paths name a process, which is another one where each rank has a space of process numbers of its own."""
    for path in (ways.memory, ways.board):
        if ways.name not in str(Path(path).readlink()):
            raise FileNotFoundError(errno.ENOENT, "it is of another process", path)


@contextmanager
def hand_over(policy: CheckpointPolicy, run: Run, world: World) -> Generator[HandOver | None]:
    """To whom this rank hands saves over while the block runs; None: ranks write themselves. Collective.

    That is the launcher of `shoal train`. Where another one started the ranks, all on this host, it is a thread of rank 0.
    """
    ways = ways_of(os.environ.get(SAVES))
    with ExitStack() as stack:
        if ways is None and wanted(policy) and world.size == world.local_size:
            ways = stack.enter_context(_to_rank_0(policy, run, world))
        yield stack.enter_context(closing(HandOver(ways, world))) if ways is not None else None


@contextmanager
def _to_rank_0(policy: CheckpointPolicy, run: Run, world: World) -> Generator[Ways]:
    """What ends early leaves its last save behind: ranks that end well have waited for it."""
    deadline_s = world.deadline.total_seconds()
    with ExitStack() as stack:
        told = None
        if world.is_main:
            made = Saver(run, world.size, deadline_s, lambda: True, print)
            told = json.dumps(stack.enter_context(closing(made)).ways)
        yield Ways(*json.loads(world.broadcast_text(told))[world.rank])
