"""What ranks run in the tests of the launcher: all-reduces in named phases, and ways to go wrong."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.config import Settings
from shoal.launch.worker import StopFlag
from shoal.observe.status import RankStatus
from shoal.world import World

PHASES = ("step", "eval", "save")


def loop(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """`train.steps` steps of three phases; the model's options say what goes wrong: [fault, phase]."""
    fault = settings.model.options.get("fault")
    for step in range(1, settings.train.steps + 1):
        for phase in PHASES:
            status.enter(phase, step)
            if fault and world.rank == 1 and step == 3 and phase == settings.model.options["phase"]:
                if fault == "return":
                    return
                if fault in ("linger", "full"):  # as on GPUs, where others wait inside a collective
                    world.close = lambda wait=True: read_forever()
                    FAULTS["raise" if fault == "linger" else fault]()
                FAULTS[fault]()
            asked = torch.tensor([float(stop.requested)])
            dist.all_reduce(asked)
            time.sleep(settings.model.options.get("pause", 0.0))
            if asked.item() and phase == "step":
                Path(settings.run.dir, f"saved-{world.rank}").write_text(str(step))
                return


def raise_error() -> None:
    raise ValueError("bad sample at index 1234")


def raise_error_with_no_room_for_it() -> None:
    """No file can grow from here on, as on a full disk: for a rank's error there is no room, nor for its log."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise_error()


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_forever() -> None:
    time.sleep(1000)


def read_forever_and_be_deaf() -> None:
    """As a main thread in native code that lets no signal through, after it has told where it was."""
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    read_forever()


FAULTS = {
    "raise": raise_error,
    "full": raise_error_with_no_room_for_it,
    "kill": kill_itself,
    "stuck": read_forever,
    "deaf": read_forever_and_be_deaf,
}


def hello(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Print and finish all steps."""
    print(f"hello from rank {world.rank} of {world.size}")
    status.enter("step", settings.train.steps)


def linger(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Finish, and in rank 1 not end."""
    hello(settings, world, status, stop)
    if world.rank == 1:
        world.close = lambda wait=True: read_forever()


def part(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Leave something to be done at the end of the process, by a thread and by `atexit`."""
    hello(settings, world, status, stop)
    folder = Path(settings.run.dir)

    def work() -> None:
        time.sleep(0.5)
        (folder / f"thread-{world.rank}").touch()

    threading.Thread(target=work).start()
    atexit.register((folder / f"atexit-{world.rank}").touch)


def ask(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Read what there is on standard input, by both ways."""
    assert sys.stdin.read() == "" and os.read(0, 1) == b""
    status.enter("step", settings.train.steps)
