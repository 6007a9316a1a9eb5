"""`launch`: start the ranks of a job on this machine, watch them, and say how it ended."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from shoal.config import Settings
from shoal.launch.failure import Scene, report
from shoal.launch.nursery import Order
from shoal.launch.progress import CallWatch
from shoal.launch.ranks import Ranks
from shoal.launch.watch import Requests, Watch, counted_requests
from shoal.launch.worker import TRAIN
from shoal.observe.health import health_watched
from shoal.resilience.faults import STRUCK
from shoal.resilience.memory import Lighter, lighter
from shoal.resilience.restarts import Failure, Restarts
from shoal.resilience.saver import Saver, saver
from shoal.resilience.snapshot import held
from shoal.run import Run, read_json_lines, write_whole

ENDED_S = (
    10.0  # until killed ranks have ended; one in a driver's call takes longer, and is left to the kernel
)
DIVERGED = ".DivergedError"  # of a device, and not of the program
STUCK = ".SaveStuckError"
DIFFERED = "ranks made different calls, which is the program's, and what memory has may be wrong since"


class Outcome(NamedTuple):
    """How a launch ended. `step` is the last step that all ranks had done; `report` tells of a failure."""

    state: Literal["ok", "interrupted", "failed"]
    step: int
    report: str = ""


def launch(
    settings: Settings, ranks: int, *, device: str = "auto", target: str = TRAIN, quiet: bool = False
) -> Outcome:
    """Run `target` on `ranks` ranks of this machine until all have ended.

    The first SIGTERM, SIGINT or SIGHUP asks every rank to finish its step, save and leave; a second one
    kills. If a rank fails, or no rank gets from one phase to the next within `run.deadline_s`, all are
    stopped. Then the report, which begins with the rank that failed first, is on stderr and in
    `<run>/ranks/failure.txt`; with `quiet` it is not on stderr. And if the run can go on (see `Restarts`) all ranks are
    started again, and do.

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
        order = Order(settings.to_toml(), target, ranks, device, os.getpid(), tuple(kept), ways)
        (run.ranks / STRUCK).unlink(missing_ok=True)
        return _generations(settings, run, order, requests, saves, quiet)


def _generations(
    settings: Settings, run: Run, order: Order, requests: Requests, saves: Saver | None, quiet: bool
) -> Outcome:
    """Start the ranks, and start them again after failures from which a run can go on."""
    # what else ranks do, such as a benchmark, has nothing that it could go on from
    restarts = Restarts(settings.run.restarts if order.target == TRAIN else 0)
    meets_by_file = settings.run.init_method.startswith("file:")  # which serves one meeting
    watched = health_watched(run, order.ranks, device=order.device, environment=os.environ)
    with watched as health, ExitStack() as stack:
        nursery = stack.enter_context(Ranks.start(order))
        while True:
            _clear(run.ranks)
            nursery.order(order)
            watch = Watch(
                run, nursery, requests, settings.run.deadline_s, CallWatch(_stages(settings, order.ranks))
            )
            scene = watch.until_end()
            if scene is not None and health is not None:
                scene = scene._replace(gpus=health.leaving())
            if scene is None:
                step = min(end.step for end in watch.ends())
                stopped = _was_stopped(run, step < settings.train.steps)
                return Outcome("interrupted" if stopped else "ok", step)
            outcome, failure = _failed(run, scene, watch.began_at, quiet)
            remedy = _remedy(settings, failure)
            failure = failure._replace(remedied=remedy.plan is not None)
            why = (
                "a signal asked it to stop" if requests.count else _why_not(restarts, failure, remedy, scene)
            )
            if why is None and meets_by_file:
                why = f"run.init_method = {settings.run.init_method} serves one meeting of ranks"
            if why is not None:
                return _given_up(run, outcome, why, quiet or order.target != TRAIN)
            settings = _with_remedy(settings, remedy, run, scene, failure, quiet)
            _say_restart(run, restarts, failure, quiet)
            if not nursery.wait_until_all_ended(ENDED_S):
                stack.close()  # now: at the end of the run the numbers of its processes may be those of others
                nursery = stack.enter_context(Ranks.start(order))
            if saves is not None:
                saves.settle()
            order = order._replace(settings=_going_on(settings).to_toml())


def _why_not(restarts: Restarts, failure: Failure, remedy: Lighter, scene: Scene) -> str | None:
    """Why there is no restart after a failure; None if there is to be one."""
    if scene.gpus:
        return "; ".join(scene.gpus)
    why = restarts.refuse(failure)
    return f"{why}; {remedy.why_not}" if why and remedy.why_not else why


def _remedy(settings: Settings, failure: Failure) -> Lighter:
    """What is changed for the next generation: nothing, unless a rank was out of memory."""
    if settings.plan is None or failure.out_of_memory is None:
        return Lighter(None)
    return lighter(settings.plan, settings.train.global_batch, failure.out_of_memory)


def _with_remedy(
    settings: Settings, remedy: Lighter, run: Run, scene: Scene, failure: Failure, quiet: bool
) -> Settings:
    """Settings with a lighter plan, if there is one, which is said."""
    if remedy.plan is None or settings.plan is None:
        return settings
    batch = settings.train.global_batch
    before, after = (plan.micro_batches(batch)[1] for plan in (settings.plan, remedy.plan))
    error = next(end.error for end in scene.ends if end.error is not None and end.error.out_of_memory)
    if not quiet:
        text = f"micro-batches of {after} in place of {before} samples from here on, of the same global batch"
        print(text, file=sys.stderr, flush=True)
    with suppress(OSError):
        run.event(
            "micro-batch halved",
            step=failure.done,
            rank=error.rank,
            before=before,
            after=after,
            memory="; ".join(error.notes),
        )
    return settings.with_plan(remedy.plan)


def _stages(settings: Settings, ranks: int) -> list[range]:
    """Ranks that do the same work, together: those of a pipeline stage."""
    each = ranks // (settings.plan.pipeline if settings.plan else 1)
    return [range(first, first + each) for first in range(0, ranks, max(1, each))]


def _given_up(run: Run, outcome: Outcome, why: str, quiet: bool) -> Outcome:
    if not quiet:
        print(f"not started again: {why}", file=sys.stderr, flush=True)
    with suppress(OSError):
        run.event("given up", step=outcome.step, reason=why)
    return outcome


def _going_on(settings: Settings) -> Settings:
    """The same, for ranks that go on with what the run itself has made."""
    return settings.model_copy(update={"run": settings.run.model_copy(update={"resume": True})})


def _say_restart(run: Run, restarts: Restarts, failure: Failure, quiet: bool) -> None:
    if not quiet:
        print(f"restart {restarts.number}, since the run can go on", file=sys.stderr, flush=True)
    with suppress(OSError):  # a disk that was full may still be
        run.event("restart", number=restarts.number, step=failure.done)


def _was_stopped(run: Run, unfinished: bool) -> bool:
    """Whether the ranks were asked to stop: the run's events say so (data can end before the last step)."""
    kinds = [event["event"] for event in read_json_lines(run.events_file)]
    ends = [kind for kind in kinds if kind in ("start", "stop", "end")]
    return ends[-1] == "stop" if ends else unfinished


def _clear(folder: Path) -> None:
    """Remove what ranks of an earlier run left, but for their logs, which grow on."""
    for pattern in ("*.status", "*.error.json", "*.stack", "*.calls", "failure.txt"):
        for path in folder.glob(pattern):
            path.unlink()


def _failed(run: Run, scene: Scene, began_at: float, quiet: bool) -> tuple[Outcome, Failure]:
    culprit, text = report(scene, run.ranks)
    if not quiet:
        print(text, file=sys.stderr, flush=True)
    with suppress(OSError):  # such as a full disk, which may be the failure
        write_whole(run.ranks / "failure.txt", text + "\n")
        run.event("fault", rank=culprit.rank, message=culprit.headline)
    done = min(end.step for end in scene.ends)
    error = next((end.error for end in scene.ends if end.rank == culprit.rank), None)
    # one that only tells of another rank's end, where no rank left a cause, is of the moment
    raised = error is not None and not error.secondary and not error.type.endswith(DIVERGED)
    full_in = error.phase if error is not None and error.out_of_memory else None
    final = DIFFERED if culprit.mismatch else ""
    if error is not None and error.type.endswith(STUCK):
        final = "what hangs there would hang again"
    begun = _begun(run, began_at, done)
    return Outcome("failed", done, text), Failure(culprit.headline, raised, begun, done, full_in, final=final)


def _begun(run: Run, began_at: float, done: int) -> int:
    """Steps that were done when ranks that were started then began, or last went back; `done` if they never did."""
    began = done
    for event in read_json_lines(run.events_file):
        if event["time"] < round(began_at, 3):
            continue
        if event["event"] == "start":
            began = event["step"]
        elif event["event"] == "rewind":
            began = event["to"]
    return began
