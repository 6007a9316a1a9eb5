"""Opening the store over which ranks find each other, in memory, a file or over TCP, or saying what is wrong.

A rank that is not rank 0 first looks for rank 0's host and port with plain sockets: torch's TCPStore client
does not honour its own timeout when the host is unreachable.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import torch.distributed as dist

from shoal.world.environments import Place
from shoal.world.meeting import WorldError


class Waits(NamedTuple):
    """Longest waits in seconds: for another rank, and for rank 0's port to answer."""

    deadline_s: float
    connect_s: float

    @property
    def first_s(self) -> float:
        return min(self.deadline_s, self.connect_s)


def open_store(place: Place, init_method: str, waits: Waits) -> dist.Store:
    """A store that all ranks of `place` share.

    Raises:
        ValueError: an init method that is not env://, tcp://host:port or file:///path, or without an address.
        WorldError: the host does not resolve, nobody listens on the port, or the port is taken on rank 0.
    """
    url = parse_init_method(init_method)
    if place.size == 1:
        return dist.HashStore()
    if url.scheme == "file":
        return _file_store(url.netloc + url.path, place, waits)
    address, port = (place.address, place.port) if url.scheme == "env" else _tcp_address(init_method)
    if not address or not port:
        raise ValueError(
            f"rank {place.rank} of {place.size}, started by {place.source}, does not know where rank 0 is: "
            "set "
            "MASTER_ADDR to its host and MASTER_PORT to a free port there, or give init_method "
            "tcp://host:port"
        )
    if place.rank == 0 and not place.agent_store:
        return serve(listen(address, port), waits)
    return connect(address, port, place.rank, waits)


def parse_init_method(init_method: str) -> SplitResult:
    """The parts of an init method.

    Raises:
        ValueError: it is not env://, tcp://host:port or file:///path.
    """
    url = urlsplit(init_method)
    if url.scheme not in ("env", "tcp", "file") or url.query:
        raise ValueError(
            f"init_method = {init_method!r} is not understood: expected env://, tcp://host:port or file:///path, "
            "with rank and size as arguments"
        )
    if url.scheme == "tcp" and not all(_tcp_address(init_method)):
        raise ValueError(f"init_method = {init_method!r}: expected tcp://host:port")
    return url


def listen(address: str, port: int) -> socket.socket:
    """A listening socket for rank 0's store, which only this host can reach if `address` is a loopback one.

    Raises:
        WorldError: the port is taken or not allowed.
    """
    local = is_loopback(address)
    family = socket.AF_INET6 if not local and socket.has_dualstack_ipv6() else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("127.0.0.1" if local else "", port))
        server.listen(2048)
    except (OSError, OverflowError) as error:
        server.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = (
            "is taken: by another program, or by a second process that is rank 0 too"
            if taken
            else f"fails: {error}"
        )
        raise WorldError(
            f"rank 0 on {socket.gethostname()}: port {port} {why}; set MASTER_PORT (or init_method) to a "
            "free port"
        ) from None
    return server


def listen_on(address: str) -> socket.socket:
    """As `listen`, on a port that is free, reached by this one address alone.

    Raises:
        WorldError: it is no address of this host.
    """
    try:
        return socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise WorldError(
            f"rank 0 on {socket.gethostname()} cannot listen on {address}: {error}; set run.interface"
        ) from None


def serve(server: socket.socket, waits: Waits) -> dist.Store:
    """Rank 0's store behind a listening socket, which it takes over."""
    host, port = server.getsockname()[:2]
    own = host if host not in ("0.0.0.0", "::") else "127.0.0.1"
    limit = timedelta(seconds=waits.deadline_s)
    return dist.TCPStore(
        own, port, None, True, limit, wait_for_workers=False, master_listen_fd=server.detach()
    )


def connect(address: str, port: int, rank: int, waits: Waits) -> dist.Store:
    """A client of rank 0's store.

    Raises:
        WorldError: within `waits.first_s`, saying whether the host, the port or what answers there is wrong.
    """
    find_listener(address, port, rank, waits.first_s)
    limit = timedelta(seconds=waits.first_s)
    try:
        store = _within(
            waits.first_s, lambda: dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)
        )
    except (dist.DistError, TimeoutError) as error:
        raise WorldError(
            f"rank {rank}: something listens on {address}:{port}, but it is not rank 0's store ({error}); "
            "set "
            "MASTER_PORT to a port that is free on rank 0's host"
        ) from error
    store.set_timeout(timedelta(seconds=waits.deadline_s))
    return store


def _within(limit_s: float, make: Callable[[], dist.Store]) -> dist.Store:
    """What `make` returns or raises; a listener that accepts and stays silent would hold TCPStore for ever."""
    made: Future[dist.Store] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return made.result(limit_s)
    except FutureTimeoutError:
        raise TimeoutError(f"it was silent for {limit_s:g} s") from None


def find_listener(address: str, port: int, rank: int, limit_s: float) -> None:
    """Return once a connection to `address:port` opens; try again until `limit_s` has passed."""
    end = time.monotonic() + limit_s
    while True:
        left = end - time.monotonic()
        try:
            with closing(socket.create_connection((address, port), timeout=max(0.2, min(2.0, left)))):
                return
        except socket.gaierror as error:
            problem = f"the host {address!r} does not resolve ({error.strerror}); check MASTER_ADDR"
        except (OSError, OverflowError) as error:
            problem = (
                f"nobody answers on {address}:{port} ({error}); check that rank 0 runs there, that "
                "MASTER_ADDR and "
                "MASTER_PORT are the same for all ranks, and that no firewall is between"
            )
        if left <= 0.25:
            raise WorldError(f"rank {rank} on {socket.gethostname()} waited {limit_s:g} s: {problem}")
        time.sleep(0.2)


def is_loopback(address: str) -> bool:
    """Whether an address is only reachable from this host."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _tcp_address(init_method: str) -> tuple[str | None, int | None]:
    url = urlsplit(init_method)
    try:
        return url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"init_method = {init_method!r}: {error}; expected tcp://host:port") from None


def _file_store(path: str, place: Place, waits: Waits) -> dist.Store:
    folder = Path(path).parent
    if not path or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(
            f"rank {place.rank}: init_method = 'file://{path}' needs a folder that exists and can be "
            f"written: {folder}"
        )
    store = dist.FileStore(path, place.size)
    store.set_timeout(timedelta(seconds=waits.deadline_s))
    return store
