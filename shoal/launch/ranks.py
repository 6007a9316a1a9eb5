"""`Ranks`: the launcher's end of the process that forks the ranks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Protocol, Self

from shoal.launch.failure import Gone
from shoal.launch.nursery import Event, Order
from shoal.observe import host


class Crew(Protocol):
    """Ranks of a run, here or on several machines, as `Watch` sees them."""

    ranks: int
    pids: dict[int, int]
    ended: dict[int, tuple[int | None, float]]

    @property
    def lost(self) -> bool: ...
    @property
    def running(self) -> bool: ...
    @property
    def alive(self) -> list[int]: ...
    @property
    def gone(self) -> Gone | None: ...
    @property
    def orphaned(self) -> Sequence[int]: ...
    def standing(self) -> Collection[int]: ...
    @property
    def unheard(self) -> bool: ...
    def listen(self, seconds: float) -> None: ...
    def pause(self, seconds: float) -> None: ...
    def send(self, number: signal.Signals) -> None: ...
    def codes(self) -> dict[int, tuple[int | None, float]]: ...


@dataclass(eq=False)
class Ranks:
    """The process that forks the ranks, and what it has said about them."""

    process: subprocess.Popen[str]
    events: int
    orders: IO[str]
    ranks: int
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int | None, float]] = field(default_factory=dict)
    lost: bool = False
    port: int = 0
    """of rank 0's store, where other machines have ranks too"""
    _unread: bytes = b""
    _closed: bool = False

    @classmethod
    def start(cls, order: Order | None = None) -> Self:
        """Begin the process, for ranks of this order; without one it imports what any order needs, and waits."""
        ours, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.nursery", str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
            text=True,
        )
        os.close(theirs)
        assert process.stdin is not None
        return cls(process, ours, process.stdin, order.ranks if order is not None else 0)

    def order(self, order: Order) -> None:
        """Have the ranks of an order forked; all those of the one before have ended."""
        self.pids.clear()
        self.ended.clear()
        self.port, self.ranks = 0, order.ranks
        with suppress(BrokenPipeError):  # it is gone, which its events say
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()

    def wait_until_all_ended(self, seconds: float) -> bool:
        """Kill the ranks, also those that are only being forked; whether all ended, and what forked them did not."""
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            self.send(signal.SIGKILL)
            self.listen(max(0.0, until - time.monotonic()))
        return not self.lost and not self.running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._closed:
            return
        self._closed = True
        self.send(signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        os.close(self.events)
        with suppress(BrokenPipeError):
            self.orders.close()

    @property
    def running(self) -> bool:
        return not self.lost and len(self.ended) < self.ranks

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.ended]

    def listen(self, seconds: float) -> None:
        """Take in what happened, waiting at most `seconds` for something to happen."""
        if not select.select([self.events], [], [], seconds)[0]:
            return
        data = os.read(self.events, 65536)
        self.lost = not data and len(self.ended) < self.ranks
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if isinstance(said, int):
                self.port = said
                continue
            event = Event(*said)
            self.pids[event.rank] = event.pid
            if event.code is not None:
                self.ended[event.rank] = (event.code, event.time)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that has not ended."""
        for rank in self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def pause(self, seconds: float) -> None:
        """Give ranks the time to do what they were asked for."""
        time.sleep(seconds)

    @property
    def gone(self) -> Gone | None:
        """A machine that ended, or is not heard any more: another than this."""
        return None

    @property
    def orphaned(self) -> Sequence[int]:
        """Ranks that ended with the process that had forked them."""
        return range(self.ranks) if self.lost else ()

    def standing(self) -> list[int]:
        """Ranks whose process is stopped (SIGSTOP) now."""
        return [rank for rank in self.alive if host.process_state(self.pids[rank]) == "T"]

    @property
    def unheard(self) -> bool:
        """Whether a machine with ranks does not say how they are: another than this."""
        return False

    def codes(self) -> dict[int, tuple[int | None, float]]:
        return {rank: self.ended.get(rank, (None, time.time())) for rank in range(self.ranks)}
