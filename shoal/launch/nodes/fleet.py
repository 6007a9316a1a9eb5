"""`Fleet`: the ranks of a run on several machines, as who leads it sees and commands them. Each machine is a `Member`.

What members tell of their ranks' files is written into a folder of the leader's own: a shared file system may show what other
machines write late, and clocks of other machines are not this one's. Times are moved to the leader's clocks on the way.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shoal.launch.failure import Gone
from shoal.launch.nodes.channel import PING_S, Channel, ChannelError
from shoal.launch.nursery import Event, Order, Place
from shoal.launch.watch import START_S, Requests
from shoal.observe.calls import moved_calls
from shoal.observe.status import moved_status

FOLDER = "shoal-ranks"
POLL_S = 0.1
SILENT = "it was not heard"
SAME_CLOCK_S = 0.05  # differences that the network makes
STOP_S = 20.0  # until a member has ended its ranks, and begun anew where they do not end


@dataclass(eq=False)
class Member:
    """A machine that takes part, or would."""

    channel: Channel
    name: str
    address: str
    slots: int
    """ranks that it can have"""
    ranks: range = range(0)
    """those that it has now"""
    stopped: bool = True
    """none of them runs"""
    leaving: str = ""
    """why it wants to leave"""
    standing: Collection[int] = ()
    """its ranks whose process is stopped (SIGSTOP)"""
    port: int = 0


@dataclass(eq=False)
class Fleet:
    """Members in the order in which they came, and the ranks of those that have any."""

    silence_s: float
    name: str = ""
    """of this machine, which leads"""
    members: list[Member] = field(default_factory=list)
    came: list[tuple[Channel, dict[str, Any], list[dict[str, Any]]]] = field(default_factory=list)
    """who would take part, and what it said after that"""
    _temporary: tempfile.TemporaryDirectory[str] | None = None
    ranks: int = 0
    orphaned: Sequence[int] = ()
    """ranks of a member that ended with the process that had forked them there"""
    gone: Gone | None = None
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int | None, float]] = field(default_factory=dict)
    requests: Requests = field(default_factory=Requests)
    """signals by which a member was asked to stop the whole run"""
    _doors: queue.SimpleQueue[Channel] = field(default_factory=queue.SimpleQueue)
    _strangers: list[Channel] = field(default_factory=list)
    _epoch: int = 0
    _closed: bool = False

    def open(self) -> None:
        """Make the folder, and remove those of processes that were killed."""
        for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}-*-*"):
            if not Path("/proc", left.name.split("-")[-2]).exists():
                shutil.rmtree(left, ignore_errors=True)
        self._temporary = tempfile.TemporaryDirectory(prefix=f"{FOLDER}-{os.getpid()}-")

    @property
    def folder(self) -> Path:
        """For what members tell of their ranks' files."""
        if self._temporary is None:
            raise ValueError("open() comes first")
        return Path(self._temporary.name)

    def let_in(self, channel: Channel) -> None:
        """Who knocked at the door, from a thread of the door's."""
        self._doors.put(channel)
        if self._closed:
            self._close_strangers()

    @property
    def lost(self) -> bool:
        return bool(self.orphaned)

    @property
    def running(self) -> bool:
        return not self.lost and len(self.ended) < self.ranks

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.ended]

    def standing(self) -> set[int]:
        """Ranks whose process is stopped (SIGSTOP), as their machines said last."""
        return {rank for member in self.members for rank in member.standing}

    @property
    def unheard(self) -> bool:
        """Whether signs of life are overdue from a machine some of whose ranks run, as far as it has told."""
        alive = set(self.alive)
        return any(
            member.channel.silent_s > 2 * PING_S and alive.intersection(member.ranks)
            for member in self.members
        )

    def codes(self) -> dict[int, tuple[int | None, float]]:
        return {rank: self.ended.get(rank, (None, time.time())) for rank in range(self.ranks)}

    def listen(self, seconds: float) -> None:
        """Take in what members say, waiting at most so long for something."""
        while not self._doors.empty():
            self._strangers.append(self._doors.get())
        channels = [*self._strangers, *(member.channel for member in self.members)]
        if not channels:
            time.sleep(min(seconds, POLL_S))
            return
        wait([channel.fileno() for channel in channels], min(seconds, POLL_S))
        for channel in list(self._strangers):
            self._greet(channel)
        for member in list(self.members):
            try:
                for message in member.channel.receive():
                    self.heard(member, message)
                if member.channel.silent_s > self.silence_s:
                    raise ChannelError(f"{SILENT} for {self.silence_s:g} s")
            except ChannelError as error:
                self._lose(member, str(error))

    def pause(self, seconds: float) -> None:
        """Give ranks time to do what they were asked for, and members to tell of it."""
        until = time.monotonic() + 2 * seconds + POLL_S
        while time.monotonic() < until:
            self.listen(until - time.monotonic())

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that has not ended."""
        self.tell([member for member in self.members if not member.stopped], {"signal": int(number)})

    def tell(self, members: Sequence[Member], message: dict[str, Any]) -> None:
        for member in members:
            with suppress(ChannelError):  # who listens finds out
                member.channel.send(message)

    def order(self, order: Order, epoch: int, size: int) -> None:
        """Have `size` ranks forked, in the order of members; all those of before have ended."""
        self._forget(size)
        taking = [member for member in self.members if not member.leaving]
        first = 0
        for member in taking:
            member.ranks = range(first, min(size, first + member.slots))
            first = member.ranks.stop
        self._epoch = epoch
        self.say_where(self.members)
        for member in taking:
            member.stopped = not member.ranks  # from here on its loss is a loss
        head = taking[0]
        head.port = 0
        firsts = tuple(member.ranks.start for member in taking if member.ranks)
        place = Place(0, size, head.address, 0, epoch, "", firsts)
        self._order(head, order, place)
        until = time.monotonic() + START_S
        while not head.port and self.gone is None and not self.lost:
            self.listen(POLL_S)
            if time.monotonic() > until:
                self._lose(head, f"its ranks were not there within {START_S:g} s")
        for member in taking[1:]:
            if member.ranks and self.gone is None:
                self._order(member, order, place._replace(first=member.ranks.start, port=head.port))

    def say_where(self, members: Sequence[Member]) -> None:
        """Tell members who has which ranks: any of them may lead next, one that only waits too, and tells of who is lost."""
        where = {member.name: [member.ranks.start, member.ranks.stop] for member in self.members}
        self.tell(members, {"where": where})

    def stop(self) -> None:
        """Kill the ranks of all members, and wait until they have said that none is left; who does not is lost."""
        self.tell(self.members, {"stop": self._epoch})
        until = time.monotonic() + STOP_S
        while not all(member.stopped for member in self.members) and time.monotonic() < until:
            self.listen(POLL_S)
        for member in [member for member in self.members if not member.stopped]:
            self._lose(member, f"its ranks did not end within {STOP_S:g} s")

    def let_go(self, member: Member, message: dict[str, Any]) -> None:
        """Part from a member."""
        self.tell([member], message)
        self.members.remove(member)
        member.channel.close()

    def close(self, message: dict[str, Any]) -> None:
        for member in list(self.members):
            self.let_go(member, message)
        self._closed = True
        self._close_strangers()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _close_strangers(self) -> None:
        while not self._doors.empty():
            with suppress(queue.Empty):
                self._doors.get_nowait().close()
        for channel in [*self._strangers, *(channel for channel, _, _ in self.came)]:
            channel.close()

    def _forget(self, size: int) -> None:
        self.ranks, self.orphaned, self.gone = size, (), None
        self.pids.clear()
        self.ended.clear()
        for path in self.folder.iterdir():
            path.unlink()
        for member in self.members:
            member.ranks, member.standing = range(0), ()

    def _order(self, member: Member, order: Order, place: Place) -> None:
        self.tell([member], {"order": order._replace(ranks=len(member.ranks), place=place)})

    def _greet(self, channel: Channel) -> None:
        """The first word of who connected: it wants to take part."""
        try:
            if (said := channel.receive()) and "join" in said[0]:
                self._strangers.remove(channel)
                self.came.append((channel, said[0]["join"], said[1:]))
                return
            if channel.silent_s > self.silence_s:
                raise ChannelError("it says nothing")
        except ChannelError:
            self._strangers.remove(channel)
            channel.close()

    def _lose(self, member: Member, why: str) -> None:
        member.channel.close()
        if member not in self.members:
            return
        self.members.remove(member)
        if member.stopped:
            return
        now = time.time()
        for rank in member.ranks:
            self.ended.setdefault(rank, (None, now))
        self.gone = self.gone or self._which(member, why, now)

    def _which(self, member: Member, why: str, now: float) -> Gone:
        """Which machine is the cause of a loss: this one, if it stood still for so long that the other gave it up."""
        still_s = member.channel.still_s
        own = next((one for one in self.members if one.name == self.name and one.ranks), None)
        if still_s > self.silence_s and own is not None:
            text = f"it stood still for {still_s:.0f} s while it led, and {member.name} gave it up"
            return Gone(own.name, own.ranks, text, now - still_s)
        return Gone(member.name, member.ranks, why, now - member.channel.silent_s)

    def heard(self, member: Member, message: dict[str, Any]) -> None:
        """Take in what a member said."""
        wall_s, monotonic_s = (
            (time.time() - message["time"], time.monotonic() - message["monotonic"])
            if "time" in message
            else (0.0, 0.0)
        )
        for name, data in message.get("files", {}).items():
            raw = base64.b64decode(data)
            if abs(wall_s) > SAME_CLOCK_S or abs(monotonic_s) > SAME_CLOCK_S:
                raw = _moved(name, raw, wall_s, monotonic_s)
            with suppress(OSError):  # a full disk
                (self.folder / name).write_bytes(raw)
        for said in message.get("events", ()):
            event = Event(*said)
            rank = event.rank + member.ranks.start
            self.pids[rank] = event.pid
            if event.code is not None:
                self.ended.setdefault(rank, (event.code, event.time + wall_s))
        if "standing" in message:
            member.standing = [rank + member.ranks.start for rank in message["standing"]]
        member.port = message.get("port", member.port)
        member.leaving = message.get("leaving", member.leaving)
        if message.get("asks"):
            self.requests.count = max(1, self.requests.count)  # once, however many machines were asked
        if message.get("lost"):
            self.orphaned = self.orphaned or member.ranks
        if message.get("stopped") == self._epoch:
            member.stopped = True


def _moved(name: str, raw: bytes, wall_s: float, monotonic_s: float) -> bytes:
    """A rank's file with its times by the leader's clocks."""
    if name.endswith(".status"):
        return moved_status(raw, wall_s, monotonic_s)
    if name.endswith(".calls"):
        return moved_calls(raw, monotonic_s)
    if name.endswith(".error.json"):
        with suppress(ValueError, KeyError):
            error = json.loads(raw)
            error["time"] += wall_s
            return json.dumps(error).encode()
    return raw
