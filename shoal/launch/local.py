"""`launch`: start the ranks of a job on this machine, watch them, and say how it ended."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from shoal.config import Settings
from shoal.launch.after import (
    Outcome,
    failed,
    given_up,
    given_up_by_hand,
    going_on,
    remedy_of,
    say_restart,
    stages_of,
    was_stopped,
    why_not,
    with_remedy,
)
from shoal.launch.nursery import Order
from shoal.launch.progress import CallWatch
from shoal.launch.ranks import Ranks
from shoal.launch.watch import Requests, Watch, counted_requests
from shoal.launch.worker import TRAIN
from shoal.observe.health import health_watched
from shoal.resilience.faults import STRUCK
from shoal.resilience.restarts import Restarts
from shoal.resilience.saver import Saver, saver
from shoal.resilience.snapshot import held
from shoal.run import Run

__all__ = ["Outcome", "launch"]

ENDED_S = (
    10.0  # until killed ranks have ended; one in a driver's call takes longer, and is left to the kernel
)


def launch(
    settings: Settings,
    ranks: int,
    *,
    device: str = "auto",
    target: str = TRAIN,
    quiet: bool = False,
    nursery: Ranks | None = None,
) -> Outcome:
    """Run `target` on `ranks` ranks of this machine until all have ended.

    The first SIGTERM, SIGINT or SIGHUP asks every rank to finish its step, save and leave; a second one
    kills. If a rank fails, or no rank gets from one phase to the next within `run.deadline_s`, all are
    stopped. Then the report, which begins with the rank that failed first, is on stderr and in
    `<run>/ranks/failure.txt`; with `quiet` it is not on stderr. And if the run can go on (see `Restarts`) all ranks are
    started again, and do.

    Args:
        nursery: begun before, so that it imports while the caller gets ready; who began it ends it, too.

    Raises:
        ValueError: fewer than one rank, or the run directory cannot be written.

    Example:
        >>> launch(Settings(), ranks=0)
        Traceback (most recent call last):
        ValueError: ranks = 0: expected at least 1
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: expected at least 1")
    run = Run(Path(settings.run.dir))
    run.create()
    with (
        run.locked(),
        held(ranks if settings.checkpoint.memory_every else 0) as kept,
        counted_requests() as requests,
        saver(
            run,
            settings.checkpoint,
            ranks if target == TRAIN else 0,
            deadline_s=settings.run.deadline_s,
            hurry=lambda: requests.count > 1,
            say=lambda text: None if quiet else print(text, file=sys.stderr, flush=True),
        ) as saves,
    ):
        ways = saves.ways if saves is not None else ()
        order = Order(settings.to_toml(), target, ranks, device, os.getpid(), tuple(kept), saves=ways)
        (run.ranks / STRUCK).unlink(missing_ok=True)
        return _generations(settings, run, order, requests, saves, quiet, nursery)


def _generations(
    settings: Settings,
    run: Run,
    order: Order,
    requests: Requests,
    saves: Saver | None,
    quiet: bool,
    nursery: Ranks | None,
) -> Outcome:
    """Start the ranks, and start them again after failures from which a run can go on."""
    # what else ranks do, such as a benchmark, has nothing that it could go on from
    restarts = Restarts(settings.run.restarts if order.target == TRAIN else 0)
    meets_by_file = settings.run.init_method.startswith("file:")  # which serves one meeting
    watched = health_watched(run, order.ranks, device=order.device, environment=os.environ)
    with watched as health, ExitStack() as stack:
        nursery = stack.enter_context(nursery or Ranks.start(order))
        while True:
            _clear(run.ranks)
            nursery.order(order)
            watch = Watch(
                run,
                nursery,
                requests,
                settings.run.deadline_s,
                CallWatch(stages_of(settings, order.ranks)),
                run.ranks,
            )
            scene = watch.until_end()
            if scene is not None and health is not None:
                scene = scene._replace(gpus=health.leaving())
            if scene is None:
                step = min(end.step for end in watch.ends())
                stopped = was_stopped(run, step < settings.train.steps)
                by = (requests.last or signal.SIGTERM) if stopped else 0  # or a rank got it itself
                return Outcome("interrupted" if stopped else "ok", step, signal=by)
            if watch.passed_on > 1:
                return given_up_by_hand(run, scene, requests.last, quiet)
            outcome, failure = failed(run, scene, watch.began_at, quiet)
            remedy = remedy_of(settings, failure)
            failure = failure._replace(remedied=remedy.plan is not None)
            why = "a signal asked it to stop" if requests.count else why_not(restarts, failure, remedy, scene)
            if why is None and meets_by_file:
                why = f"run.init_method = {settings.run.init_method} serves one meeting of ranks"
            if why is not None:
                return given_up(run, outcome, why, quiet or order.target != TRAIN)
            settings = with_remedy(settings, remedy, run, scene, failure, quiet)
            say_restart(run, restarts, failure, quiet)
            if not nursery.wait_until_all_ended(ENDED_S):
                stack.close()  # now: at the end of the run the numbers of its processes may be those of others
                nursery = stack.enter_context(Ranks.start(order))
            if saves is not None:
                saves.settle()
            order = order._replace(settings=going_on(settings).to_toml())


def _clear(folder: Path) -> None:
    """Remove what ranks of an earlier run left, but for their logs, which grow on."""
    for pattern in ("*.status", "*.error.json", "*.stack", "*.calls", "failure.txt"):
        for path in folder.glob(pattern):
            path.unlink()
