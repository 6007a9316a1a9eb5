"""Machines of a run, each a process that has imported torch: what `shoal train` is on each, without the seconds of imports."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self, cast
from unittest.mock import patch

from shoal.config import Settings
from shoal.launch import nursery
from shoal.launch.after import Outcome
from shoal.launch.nursery import Order
from shoal.launch.ranks import Ranks
from shoal.run import read_json_lines
from tests.ranks import PRELOAD


class Machine:
    """One of several on this host, or the only one: a process that ends with all its ranks when it is killed.

    Args:
        namespace: the network namespace in which it is; None: this one.
    """

    def __init__(self, settings: Settings, *, namespace: str | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "shoal.launch.nodes.launch", "shoal.launch.ready"])
        self._ended, theirs = context.Pipe(duplex=False)
        output = Path(settings.run.dir) / "machines"
        output.mkdir(parents=True, exist_ok=True)
        self.output = output / f"{len(list(output.iterdir()))}.txt"
        self.output.touch()
        self.process: ForkServerProcess = context.Process(
            target=_machine, args=(settings.to_toml(), theirs, str(self.output), namespace)
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, timeout: float = 60.0) -> str | None:
        """How the run ended for it, as (state) or an error's text; None if it was killed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"machine {self.pid} still runs; it said: {self.output.read_text()}")
        with suppress(EOFError):
            return cast(str, self._ended.recv())
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not so within {seconds:g} s: {what}")
        time.sleep(0.02)


def steps_of(folder: Path) -> list[int]:
    """Steps of a run so far, as they were written down."""
    return [row["step"] for row in read_json_lines(folder / "metrics.jsonl") if "loss" in row]


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["event"] == kind]


def children_of(pid: int) -> list[int]:
    """Processes below one, all of them."""
    found: list[int] = []
    with suppress(OSError):
        for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(name), *children_of(int(name))]
    return found


def _machine(settings: str, ended: Connection, output: str, namespace: str | None) -> None:
    if namespace is not None:
        with Path("/var/run/netns", namespace).open() as file:
            ctypes.CDLL(None).setns(file.fileno(), 0x40000000)  # CLONE_NEWNET; os.setns came with Python 3.12
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    nurseries = [_nursery()]  # while there is but one thread
    with patch.object(Ranks, "start", lambda order: _ranks(order, nurseries)):
        try:
            ended.send(_launch(Settings.from_toml(settings)).state)
        except ValueError as error:
            ended.send(str(error))
    os._exit(0)


def _launch(settings: Settings) -> Outcome:
    from shoal.cluster import Cluster
    from shoal.launch.local import launch
    from shoal.launch.nodes.launch import launch_on_nodes
    from shoal.launch.ready import make_ready

    if settings.run.nodes_from_to is None:
        settings = make_ready(settings)
        assert settings.plan is not None
        return launch(settings, settings.plan.world_size, device="cpu")
    return launch_on_nodes(
        settings, lambda said, ranks: make_ready(said, ranks=ranks), Cluster.parse("1 cpu"), device="cpu"
    )


def _ranks(order: Order, nurseries: list[tuple[int, int, int]]) -> Ranks:
    pid, events, orders = nurseries.pop() if nurseries else _nursery()
    process = cast(subprocess.Popen[str], _Forked(pid))
    return Ranks(process, events, os.fdopen(orders, "w"), order.ranks)


class _Forked:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self._pid, 0)


def _nursery() -> tuple[int, int, int]:
    """A process that forks ranks: its number, what it tells, and where it takes orders."""
    tells, told = os.pipe()
    reads, written = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        os.close(reads)
        return pid, tells, written
    os.setsid()
    os.close(tells)
    os.close(written)
    sys.stdin = os.fdopen(reads)
    os._exit(nursery.main(told))
