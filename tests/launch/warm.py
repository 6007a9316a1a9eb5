"""A nursery forked from a process that has imported torch: a launch without the seconds of imports that begin it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast
from unittest.mock import patch

from shoal.launch import nursery
from shoal.launch.nursery import Order
from shoal.launch.ranks import Ranks
from tests.ranks import PRELOAD

BEGIN = nursery._begin


class Warm:
    """What `Ranks` asks of its process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def start(order: Order | None = None) -> Ranks:
    """As `Ranks.start`, but for the process: its environment and terminal are those that the first tests had."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    read, written = context.Pipe(duplex=False)
    process = context.Process(target=_nursery, args=(theirs, read, str(Path.cwd())))
    process.start()
    theirs.close()
    read.close()
    orders = os.fdopen(os.dup(written.fileno()), "w")
    return Ranks(
        cast(subprocess.Popen[str], Warm(process)), os.dup(ours.fileno()), orders, order.ranks if order else 0
    )


def _nursery(events: Connection, orders: Connection, folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    sys.stdin = os.fdopen(os.dup(orders.fileno()))
    orders.close()
    with patch.object(nursery, "_begin", _begin):
        os._exit(nursery.main(events.fileno()))


def _begin(order: Order) -> None:
    """As a nursery's, but the forkserver is its parent, and not the launcher."""
    BEGIN(order._replace(launcher=os.getppid()))
