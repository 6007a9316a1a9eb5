"""Between a launcher and its ranks: imports torch once, forks the ranks, and says how each ended.

Run as `python -m shoal.launch.nursery <events fd>`, with an `Order` a line on its standard input: the first is read when all is
imported, the next one when all ranks of the one before have ended, so that ranks are started again without the seconds that
importing takes.

[Note: why not torch's elastic agent] On a failure it blocks for up to 30 s in a SIGTERM to ranks that wait
in a collective and cannot hear it, gives the exit code of one rank only when ranks are functions, and
imports torch in each rank when they are programs. Here ranks are forked from a warm parent, and each end is
known by waitpid, in order. Neither outlives its parent: the kernel kills the nursery with the launcher, and
the ranks with the nursery.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from shoal.config import Settings
from shoal.launch.worker import TRAIN, die_with, run_rank
from shoal.resilience.epochs import EPOCH
from shoal.resilience.faults import LAUNCHER
from shoal.resilience.saver import SAVES, Ways
from shoal.resilience.snapshot import KEPT, Kept, lost_with_one

if TYPE_CHECKING:
    from shoal.world import World

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "shoal.world",
)


class Place(NamedTuple):
    """Ranks of one machine among all ranks of a run."""

    first: int
    """the number of its first rank"""
    size: int
    """ranks of all machines"""
    address: str
    """of the machine of rank 0"""
    port: int
    """of rank 0's store there; 0 on that machine, which chooses it"""
    epoch: int
    interface: str
    """the network interface of this machine by which it is reached"""
    firsts: tuple[int, ...]
    """the number of the first rank of each machine"""


class Order(NamedTuple):
    """What a nursery is to do: settings as TOML, the function of a rank, ranks, device, the launcher's process."""

    settings: str
    target: str
    ranks: int
    device: str
    launcher: int
    kept: tuple[str, ...] = ()
    """a path a rank, of memory that the launcher holds: see `shoal.resilience.snapshot`"""
    guests: tuple[str, ...] = ()
    """the same, for what ranks of another machine copy here"""
    saves: tuple[Ways, ...] = ()
    """for each rank, how it hands saves over: see `shoal.resilience.saver`"""
    place: Place | None = None
    """where these ranks stand among those of other machines; None: they are all"""


class Event(NamedTuple):
    """A rank began (`code` is None) or ended with an exit code, negative for a signal; `time` since 1970."""

    rank: int
    pid: int
    code: int | None
    time: float


def main(events: int) -> int:
    # whoever signals the whole group reaches the ranks themselves
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # before there is an order: who gives it may still have to get ready, which takes as long
    for name in PRELOAD:
        importlib.import_module(name)
    with contextlib.suppress(Exception):  # the ranks import it again, and report what is wrong
        importlib.import_module(TRAIN.partition(":")[0])
    is_first = True
    while line := sys.stdin.readline():
        order = as_order(json.loads(line))
        if is_first:
            _begin(order)
            is_first = False
        if (code := _generation(order, events)) is not None:
            return code  # of a rank
    return 0


def as_order(fields: Sequence[Any]) -> Order:
    """An order from what JSON made of it."""
    order = Order(*fields)
    return order._replace(place=Place(*order.place)) if order.place is not None else order


def _begin(order: Order) -> None:
    die_with(order.launcher)


def _generation(order: Order, events: int) -> int | None:
    """Fork the ranks of an order and wait for all of them; in a rank, its exit code."""
    settings = Settings.from_toml(order.settings)
    server = _preload(order, settings)
    if order.place is not None and order.place.first == 0:
        _tell(events, server.getsockname()[1])
    pids: dict[int, int] = {}
    parent = os.getpid()
    # a rank is born with these ignored; blocked, they wait until it listens (see StopFlag.listen)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    for rank in range(order.ranks):
        pid = os.fork()
        if pid == 0:
            os.close(events)
            die_with(parent)
            _read_nothing()
            return _be_rank(order, settings, rank, server)
        pids[pid] = rank
        _tell(events, Event(rank, pid, None, time.time()))
    server.close()
    while pids:
        pid, status = os.waitpid(-1, 0)
        if pid in pids:
            _tell(events, Event(pids.pop(pid), pid, os.waitstatus_to_exitcode(status), time.time()))
    return None


def _read_nothing() -> None:
    """Standard input brings orders, which a rank that reads (a debugger, `input`) would wait for and take."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)


def _preload(order: Order, settings: Settings) -> socket.socket:
    """Import what ranks need, and open the port of rank 0's store, which only this host can reach."""
    with contextlib.suppress(Exception):  # the ranks import it again, and report what is wrong
        importlib.import_module(order.target.partition(":")[0])
    from shoal.world.rendezvous import listen, listen_on

    if order.place is not None and order.place.first == 0:
        return listen_on(order.place.address)
    return listen("127.0.0.1", 0)


def _be_rank(order: Order, settings: Settings, rank: int, server: socket.socket) -> int:
    port = server.getsockname()[1]
    there = order.place or Place(0, order.ranks, "127.0.0.1", port, 0, "lo", (0,))
    number = there.first + rank
    place = {
        "RANK": number,
        "WORLD_SIZE": there.size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": order.ranks,
        "MASTER_ADDR": there.address,
        "MASTER_PORT": there.port or port,
    }
    os.environ.update({name: str(value) for name, value in place.items()} | {LAUNCHER: str(order.launcher)})
    if order.kept:
        os.environ[KEPT] = json.dumps(_kept(order, rank, there))
    if order.saves:
        os.environ[SAVES] = json.dumps(order.saves[rank])
    if order.place is not None:
        os.environ[EPOCH] = str(there.epoch)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", there.interface)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", there.interface)
    error = run_rank(
        settings,
        order.target,
        number,
        lambda: _open(order, settings, number, server),
        order.ranks,
        there.size,
    )
    return 0 if error is None else 1


def _kept(order: Order, rank: int, there: Place) -> Kept:
    """A rank's memory, with room for a guest if some part of the state could be lost with one machine."""
    plan = Settings.from_toml(order.settings).plan
    copies = bool(order.guests) and plan is not None and lost_with_one(plan, there.firsts)
    return Kept(
        order.kept[rank], [*order.kept, *order.guests], order.guests[rank] if copies else None, there.first
    )


def _open(order: Order, settings: Settings, rank: int, server: socket.socket) -> World:
    from shoal.world import join_world
    from shoal.world.rendezvous import Waits, serve

    run = settings.run
    size = order.ranks if order.place is None else order.place.size
    mine = rank == 0 and size > 1 and run.init_method == "env://"
    store = serve(server, Waits(run.deadline_s, run.deadline_s)) if mine else server.close()
    return join_world(
        backend=run.backend,
        init_method=run.init_method,
        deadline_s=run.deadline_s,
        device=order.device,
        store=store,
    )


def _tell(events: int, event: Event | int) -> None:
    """An event, or the port of rank 0's store."""
    os.write(events, (json.dumps(event) + "\n").encode())


def leave(code: int) -> NoReturn:
    """End this process as the interpreter would, but without taking itself apart.

    With torch's modules that takes 2 s in a forked process, whose memory is copied page by page for it: others would wait so
    long for the end of a rank that failed. What threads and `atexit` have to do first is done, by CPython's own functions for
    it; they are not public (multiprocessing ends its forked processes in the same way, Lib/multiprocessing/process.py). What C
    code has buffered is written, too; what a program wrote into a file of Python's that it never closed is not.
    """
    for last in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            last()
        except Exception:  # as the interpreter's own end, which only tells of it
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
