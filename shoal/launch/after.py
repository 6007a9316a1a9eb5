"""What follows when the ranks of a run have ended: how it is told, and whether and with what they are started again."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import Literal, NamedTuple

from shoal.config import Settings
from shoal.launch.failure import Scene, report
from shoal.resilience.memory import Lighter, lighter
from shoal.resilience.restarts import Failure, Restarts
from shoal.run import Run, read_json_lines, write_whole

DIVERGED = ".DivergedError"  # of a device, and not of the program
STUCK = ".SaveStuckError"
DIFFERED = "ranks made different calls, which is the program's, and what memory has may be wrong since"


class Outcome(NamedTuple):
    """How a launch ended. `step` is the last step that all ranks had done; `report` tells of a failure."""

    state: Literal["ok", "interrupted", "failed"]
    step: int
    report: str = ""
    signal: int = 0
    """by which this machine's launcher was asked to stop"""

    @property
    def exit_code(self) -> int:
        """Of `shoal train`: 0, 1 after a failure, and as of a program that a signal ended if one asked it to stop.

        Example:
            >>> Outcome("interrupted", 3, signal=15).exit_code
            143
        """
        return 1 if self.state == "failed" else 128 + self.signal if self.signal else 0


def why_not(restarts: Restarts, failure: Failure, remedy: Lighter, scene: Scene) -> str | None:
    """Why there is no restart after a failure; None if there is to be one."""
    if scene.gpus:
        return "; ".join(scene.gpus)
    why = restarts.refuse(failure)
    return f"{why}; {remedy.why_not}" if why and remedy.why_not else why


def remedy_of(settings: Settings, failure: Failure) -> Lighter:
    """What is changed for the next generation: nothing, unless a rank was out of memory."""
    if settings.plan is None or failure.out_of_memory is None:
        return Lighter(None)
    return lighter(settings.plan, settings.train.global_batch, failure.out_of_memory)


def with_remedy(
    settings: Settings, remedy: Lighter, run: Run, scene: Scene, failure: Failure, quiet: bool
) -> Settings:
    """Settings with a lighter plan, if there is one, which is said."""
    if remedy.plan is None or settings.plan is None:
        return settings
    batch = settings.train.global_batch
    before, after = (
        plan.micro_batches(batch)[1] * max(plan.shares, default=1) for plan in (settings.plan, remedy.plan)
    )
    error = next(end.error for end in scene.ends if end.error is not None and end.error.out_of_memory)
    if not quiet:
        most = " at most" if settings.plan.shares else ""
        text = f"micro-batches of {after}{most} in place of {before} samples from here on, of the same global batch"
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


def stages_of(settings: Settings, ranks: int) -> list[range]:
    """Ranks that do the same work, together: those of a pipeline stage."""
    each = ranks // (settings.plan.pipeline if settings.plan else 1)
    return [range(first, first + each) for first in range(0, ranks, max(1, each))]


def given_up(run: Run, outcome: Outcome, why: str, quiet: bool) -> Outcome:
    if not quiet:
        print(f"not started again: {why}", file=sys.stderr, flush=True)
    with suppress(OSError):
        run.event("given up", step=outcome.step, reason=why)
    return outcome


def going_on(settings: Settings) -> Settings:
    """The same, for ranks that go on with what the run itself has made."""
    return settings.model_copy(update={"run": settings.run.model_copy(update={"resume": True})})


def say_restart(run: Run, restarts: Restarts, failure: Failure, quiet: bool) -> None:
    if not quiet:
        print(f"restart {restarts.number}, since the run can go on", file=sys.stderr, flush=True)
    with suppress(OSError):  # a disk that was full may still be
        run.event("restart", number=restarts.number, step=failure.done)


def was_stopped(run: Run, unfinished: bool) -> bool:
    """Whether the ranks were asked to stop: the run's events say so (data can end before the last step)."""
    kinds = [event["event"] for event in read_json_lines(run.events_file)]
    ends = [kind for kind in kinds if kind in ("start", "stop", "end")]
    return ends[-1] == "stop" if ends else unfinished


def given_up_by_hand(run: Run, scene: Scene, number: int, quiet: bool) -> Outcome:
    """A second signal killed the ranks before they had saved: no rank is to blame."""
    done = min(end.step for end in scene.ends)
    text = f"stopped without saving, by a second {signal.Signals(number).name}, in step {done}"
    if not quiet:
        print(text, file=sys.stderr, flush=True)
    with suppress(OSError):
        run.event("killed", step=done, reason=text)
    return Outcome("interrupted", done, text, number)


def failed(run: Run, scene: Scene, began_at: float | None, quiet: bool) -> tuple[Outcome, Failure]:
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


def _begun(run: Run, began_at: float | None, done: int) -> int:
    """Steps that were done when the ranks began, or last went back; `done` if they never did.

    Args:
        began_at: when they were started, by this machine's clock; None: what follows the last event `epoch` is of them.
    """
    began = done
    for event in read_json_lines(run.events_file):
        if began_at is not None and event["time"] < round(began_at, 3):
            continue
        if event["event"] == "epoch":
            began = done
        elif event["event"] == "start":
            began = event["step"]
        elif event["event"] == "rewind":
            began = event["to"]
    return began
