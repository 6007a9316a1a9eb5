"""What each machine of a run does: it has ranks for who leads, and keeps their memory from one leader to the next."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from shoal.launch.errors import RankFiles
from shoal.launch.nodes.channel import Channel, ChannelError
from shoal.launch.nursery import Event, Order, as_order
from shoal.launch.ranks import Ranks
from shoal.launch.watch import Requests
from shoal.observe.health import HealthWatch
from shoal.resilience.saver import Saver
from shoal.resilience.shares import Share
from shoal.run import Run

TELL_S = 0.25  # between looks at the files of ranks
CALLS_S = 1.0
POLL_S = 0.05
ENDED_S = 10.0
SETTLE_S = 1.0  # for a save that was handed over before its ranks ended: all machines wait for it


class Parted(NamedTuple):
    """How it ended with a leader: what it said last, or why it is not there any more."""

    message: dict[str, Any]
    why: str = ""
    silent: bool = False
    """it may live, and only cannot be reached"""
    still_s: float = 0.0
    """that this machine stood still, longer than who leads waits for one"""


@dataclass(eq=False)
class Here:
    """This machine."""

    run: Run
    name: str
    address: str
    interface: str
    slots: int
    device: str
    kept: tuple[str, ...]
    """memory of ranks, by slot"""
    guests: tuple[str, ...]
    """the same, for ranks of another machine"""
    requests: Requests
    health: HealthWatch | None = None
    saves: Saver | None = None
    epoch: int = 0
    """the first in which it took part"""
    ranks: Ranks | None = None
    where: dict[str, range] = field(default_factory=dict)
    """ranks of each machine in that epoch"""
    _stack: ExitStack = field(default_factory=ExitStack)
    _served: Served | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None:
            self._stack.enter_context(self.ranks)

    def follow(self, channel: Channel, job: str, silence_s: float) -> Parted:
        """Do what a leader says until it has said how the run ended, or is gone; no rank is left then."""
        join = {"name": self.name, "address": self.address, "slots": self.slots}
        asked = 0  # also what was asked before this leader was there
        try:
            channel.send({"join": join | {"job": job}})
            while True:
                for message in channel.receive():
                    if "parted" in message:
                        return Parted(message["parted"])
                    self._do(message, channel)
                if channel.silent_s > silence_s:
                    return Parted({}, f"it was not heard for {silence_s:g} s", silent=True)
                if self.requests.count > asked:
                    asked = self.requests.count
                    self._ask(channel)
                self._tell(channel)
        except ChannelError as error:
            return Parted({}, str(error), still_s=channel.still_s if channel.still_s > silence_s else 0.0)
        finally:
            channel.close()
            self._stop()

    def close(self) -> None:
        self._stack.close()

    def _ask(self, channel: Channel) -> None:
        """A signal came: SIGINT asks the whole run to stop, others are for this machine. A second one ends it here."""
        if self.requests.count > 1:
            raise ChannelError("a second signal asked it to end at once")
        if self.requests.last == signal.SIGINT:
            channel.send({"asks": 1})
        else:
            channel.send({"leaving": signal.Signals(self.requests.last or signal.SIGTERM).name})

    def _do(self, message: dict[str, Any], channel: Channel) -> None:
        if "where" in message:
            self.where = {name: range(*ranks) for name, ranks in message["where"].items()}
        elif "order" in message:
            self._begin(as_order(message["order"]))
        elif "signal" in message and self.ranks is not None:
            self.ranks.send(signal.Signals(message["signal"]))
        elif "stop" in message:
            had_ranks = self._served is not None
            self._stop()
            ill = self.health.leaving() if had_ranks and self.health is not None else []
            leaving = {"leaving": "; ".join(ill)} if ill else {}
            channel.send({"stopped": message["stop"]} | leaving | _clocks())

    def _begin(self, order: Order) -> None:
        assert order.place is not None
        place = order.place._replace(interface=self.interface)
        share = Share(place.first, order.ranks, place.size, place.firsts, place.epoch)
        saves = self.saves.share(share) if self.saves is not None else ()
        order = order._replace(
            place=place,
            launcher=os.getpid(),
            kept=self.kept,
            device=self.device,
            guests=self.guests,
            saves=saves,
        )
        for rank in range(place.first, place.first + order.ranks):
            RankFiles.of(self.run.ranks, rank).clear()
        self._served = Served(order)
        if self.health is not None:
            self.health.first_rank = place.first
        if self.ranks is None:
            self.ranks = self._stack.enter_context(Ranks.start(order))
        self.ranks.order(order)

    def _tell(self, channel: Channel) -> None:
        """Wait a moment for what ranks and leader do, and tell of it."""
        ranks, served = self.ranks, self._served
        if ranks is None or served is None:
            wait([channel.fileno()], POLL_S)
            return
        if ranks.events in wait([channel.fileno(), ranks.events], POLL_S):
            ranks.listen(0.0)
        message = served.news(ranks, self.run.ranks)
        if ranks.lost:
            message["lost"] = True
            self._stack.close()
            self.ranks = None
        if message:
            channel.send(message | _clocks())

    def _stop(self) -> None:
        """End all ranks; what forked them too if it does not get rid of them."""
        ranks = self.ranks if self._served is not None else None
        if ranks is not None and not ranks.wait_until_all_ended(ENDED_S):
            self._stack.close()
            self.ranks = None
        if self.saves is not None and self._served is not None:
            self.saves.settle(SETTLE_S)
        self._served = None


class Served:
    """Ranks of one order, and what the leader knows of them."""

    def __init__(self, order: Order) -> None:
        assert order.place is not None
        self._numbers = range(order.place.first, order.place.first + order.ranks)
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._port_told = False
        self._standing: list[int] = []
        self._files: dict[str, bytes] = {}
        # who leads has the more to read the more machines there are
        self._tell_s = TELL_S * max(1.0, len(order.place.firsts) / 16)
        self._next = self._next_calls = 0.0

    def news(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        """What the leader does not know yet; nothing if that is nothing, or not worth a message yet."""
        message: dict[str, Any] = {}
        if ranks.port and not self._port_told:
            self._port_told, message["port"] = True, ranks.port
        if events := self._events(ranks):
            message["events"] = events
        now = time.monotonic()
        if events or now >= self._next:  # with the end of a rank comes what it left
            self._next = now + self._tell_s
            if (standing := ranks.standing()) != self._standing:
                self._standing = message["standing"] = standing
            if files := self._changed(
                folder, ranks.pids.values(), with_calls=bool(events) or now >= self._next_calls
            ):
                message["files"] = files
        return message

    def _events(self, ranks: Ranks) -> list[Event]:
        begun = [
            Event(rank, pid, None, time.time()) for rank, pid in ranks.pids.items() if rank not in self._begun
        ]
        ended = [
            Event(rank, ranks.pids[rank], *how)
            for rank, how in ranks.ended.items()
            if rank not in self._ended
        ]
        self._begun.update(event.rank for event in begun)
        self._ended.update(event.rank for event in ended)
        return begun + ended

    def _changed(self, folder: Path, pids: Collection[int], *, with_calls: bool) -> dict[str, str]:
        found: dict[str, str] = {}
        if with_calls:
            self._next_calls = time.monotonic() + CALLS_S / TELL_S * self._tell_s
        for rank in self._numbers:
            files = RankFiles.of(folder, rank)
            for path in (files.status, files.error, files.stack, *([files.calls] * with_calls)):
                raw = _read(path)
                if path == files.error and raw and not _is_of(raw, pids):
                    continue  # left by a rank of this number that was elsewhere
                if raw and raw != self._files.get(path.name):
                    self._files[path.name] = raw
                    found[path.name] = base64.b64encode(raw).decode()
        return found


def _is_of(error: bytes, pids: Collection[int]) -> bool:
    try:
        return json.loads(error)["pid"] in pids
    except (ValueError, KeyError, TypeError):
        return False


def _clocks() -> dict[str, float]:
    return {"time": time.time(), "monotonic": time.monotonic()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def own_address(interface: str | None) -> tuple[str, str]:
    """The interface by which other machines reach this one, and its address.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    found = dict(_interfaces())
    if interface is not None:
        if interface not in found:
            raise ValueError(
                f"run.interface = {interface!r}: this machine has {', '.join(found) or 'none'} with an IPv4 address"
            )
        return interface, found[interface]
    routed = _address_of_route()
    named = next((name for name, address in found.items() if address == routed), None)
    name = named or next((name for name in found if name != "lo"), "lo")
    return name, found.get(name, "127.0.0.1")


def _interfaces() -> Sequence[tuple[str, str]]:
    """Names and IPv4 addresses, by the kernel's own question for it (Linux)."""
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(asks, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            found.append((name, socket.inet_ntoa(raw[20:24])))
    return found


def _address_of_route() -> str:
    """That by which this machine would reach the rest of the world; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            asks.connect(("192.0.2.1", 9))  # of a network that is for documentation
        except OSError:
            return ""
        return str(asks.getsockname()[0])
