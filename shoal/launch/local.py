"""`launch`: start the ranks of a job on this machine, watch them, and say how it ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Literal, NamedTuple, Self

from shoal.config import Settings
from shoal.launch.failure import (
    End,
    Scene,
    holds_up,
    is_compiling,
    line_of,
    read_ends,
    report,
)
from shoal.launch.nursery import Event, Order
from shoal.launch.progress import CallWatch, Quiet
from shoal.launch.worker import SAME_STOP_S, TRAIN
from shoal.observe import host
from shoal.observe.calls import Calls, read_all_calls
from shoal.observe.health import health_watched
from shoal.observe.host import Memory
from shoal.observe.verdict import find_mismatch
from shoal.resilience.faults import STRUCK
from shoal.resilience.memory import Lighter, lighter
from shoal.resilience.restarts import Failure, Restarts
from shoal.resilience.saver import Saver, saver
from shoal.resilience.snapshot import held
from shoal.run import Run, read_json_lines, write_whole

SETTLE_S = 2.0  # how long other ranks may take to end by themselves, once one has failed
STACK_S = 0.3  # how long a rank takes to write its stack on SIGUSR1
START_S = 120.0  # importing torch from a busy network disk can take a minute
ENDED_S = (
    10.0  # until killed ranks have ended; one in a driver's call takes longer, and is left to the kernel
)
POLL_S = 0.1
DIVERGED = ".DivergedError"  # of a device, and not of the program
DIFFERED = "ranks made different calls, which is the program's, and what memory has may be wrong since"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
        _requests() as requests,
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
    """Whether the ranks were asked to stop: the run's last event says so (data can end before the last step)."""
    kinds = [event["event"] for event in read_json_lines(run.events_file)]
    return kinds[-1] == "stop" if kinds else unfinished


@dataclass(eq=False)
class Ranks:
    """The process that forks the ranks, and what it has said about them."""

    process: subprocess.Popen[str]
    events: int
    orders: IO[str]
    ranks: int
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[int | None, float]] = field(default_factory=dict)
    lost: bool = False
    _unread: bytes = b""

    @classmethod
    def start(cls, order: Order) -> Self:
        ours, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.nursery", str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
            text=True,
        )
        os.close(theirs)
        assert process.stdin is not None
        return cls(process, ours, process.stdin, order.ranks)

    def order(self, order: Order) -> None:
        """Have the ranks of an order forked; all those of the one before have ended."""
        self.pids.clear()
        self.ended.clear()
        with suppress(BrokenPipeError):  # it is gone, which its events say
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()

    def wait_until_all_ended(self, seconds: float) -> bool:
        """Kill the ranks, also those that are only being forked; whether all ended, and what forked them did not."""
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            self.send(signal.SIGKILL)
            self.listen(max(0.0, until - time.monotonic()))
        return not self.lost and not self.running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        os.close(self.events)
        with suppress(BrokenPipeError):
            self.orders.close()

    @property
    def running(self) -> bool:
        return not self.lost and len(self.ended) < self.ranks

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.pids if rank not in self.ended]

    def listen(self, seconds: float) -> None:
        """Take in what happened, waiting at most `seconds` for something to happen."""
        if not select.select([self.events], [], [], seconds)[0]:
            return
        data = os.read(self.events, 65536)
        self.lost = not data and len(self.ended) < self.ranks
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            event = Event(*json.loads(line))
            self.pids[event.rank] = event.pid
            if event.code is not None:
                self.ended[event.rank] = (event.code, event.time)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that has not ended."""
        for rank in self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def codes(self) -> dict[int, tuple[int | None, float]]:
        return {rank: self.ended.get(rank, (None, time.time())) for rank in range(self.ranks)}


@dataclass(eq=False)
class Requests:
    """Signals that the launcher got; a person's Ctrl-C and a scheduler's copy of it count once."""

    count: int = 0
    _last: float = -SAME_STOP_S

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > 0.2:
            self.count += 1
        self._last = now


@dataclass(eq=False)
class Watch:
    """What the launcher does while ranks run: pass on signals, notice an end or a stall, remember memory."""

    run: Run
    nursery: Ranks
    requests: Requests
    deadline_s: float
    calls: CallWatch
    quiet: Quiet = field(default_factory=Quiet)
    passed_on: int = 0
    warned: float = 0.0
    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    """since 1970"""
    oom_before: int = field(default_factory=host.oom_kills)
    most_memory: Memory | None = None

    def until_end(self) -> Scene | None:
        """Return when all ranks have ended well (None), or have been stopped because one did not."""
        next_look = 0.0
        while self.nursery.running:
            self.nursery.listen(POLL_S)
            self._pass_on()
            if any(code for code, _ in self.nursery.ended.values()) or self.passed_on > 1:
                return self._stop_all(0.0)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + min(0.5, self.deadline_s / 20)
                self._remember_memory()
                ends = self.ends()
                if self._failed(ends) or self._calls_differ(ends):
                    return self._stop_all(0.0)
                stalled = self._stalled_s(ends)
                if stalled > (self.deadline_s if _started(ends) else max(START_S, self.deadline_s)):
                    return self._stop_all(stalled)
                self._warn(ends, stalled)
        return None if self._ended_well() else self._stop_all(0.0)

    def ends(self) -> list[End]:
        return read_ends(self.run.ranks, self.nursery.codes())

    def _ended_well(self) -> bool:
        if self.nursery.lost or any(code for code, _ in self.nursery.ended.values()):
            return False
        return find_mismatch(self._read_calls()) is None  # after the last look

    def _failed(self, ends: list[End]) -> bool:
        """Whether a rank said that it failed: leaving a process group on GPUs can take it for ever when others wait."""
        return any(end.status is not None and end.status.state == "failed" for end in ends)

    def _calls_differ(self, ends: list[End]) -> bool:
        """Whether ranks of a group made different calls; tells of slow ranks by the way."""
        if not self.calls.is_due:
            return False
        differ, slow = self.calls.look(self._read_calls(), ends)
        for rank, ratio, reason in slow:
            self._alert(rank, f"rank {rank} is slow: others wait for it, {reason} ({ratio:.1f} times theirs)")
        return differ

    def _read_calls(self) -> dict[int, Calls]:
        return read_all_calls(self.run.ranks, range(self.nursery.ranks))

    def _pass_on(self) -> None:
        all_there = len(self.nursery.pids) == self.nursery.ranks
        if self.requests.count > self.passed_on and (all_there or self.requests.count > 1):
            self.passed_on = self.requests.count
            self.nursery.send(signal.SIGTERM if self.passed_on == 1 else signal.SIGKILL)

    def _stop_all(self, stalled_s: float) -> Scene:
        """Let the others end by themselves for a moment, take the stacks of those that do not, and kill."""
        until = time.monotonic() + (0.0 if stalled_s or self.passed_on > 1 else SETTLE_S)
        while self.nursery.running and time.monotonic() < until:
            self.nursery.listen(max(0.0, until - time.monotonic()))
        self._take_stacks()
        oom_kills = host.oom_kills() - self.oom_before
        calls = self._read_calls()
        scene = Scene(self.ends(), self.most_memory, oom_kills, stalled_s, self.nursery.lost, calls=calls)
        self.nursery.send(signal.SIGKILL)
        return scene

    def _take_stacks(self) -> None:
        if self.nursery.alive:
            self.nursery.send(signal.SIGUSR1)
            time.sleep(STACK_S)

    def _stalled_s(self, ends: list[End]) -> float:
        changes = [end.status.monotonic for end in ends if end.status]
        return time.monotonic() - max([self.began, *changes])

    def _warn(self, ends: list[End], stalled_s: float) -> None:
        """Say once a stall which rank holds the others up: when it is long for these ranks, or a quarter of the deadline."""
        self.quiet.look(ends, stalled_s, time.monotonic())
        limit = min(self.quiet.limit_s, self.deadline_s / 4)
        if stalled_s < limit or not _started(ends) or all(end.finished for end in ends):
            self.warned = 0.0
        elif stalled_s > 2 * self.warned:
            self._take_stacks()
            ends = self.ends()
            if any(is_compiling(end.stack) for end in ends):
                self.warned = stalled_s
                return
            self.warned = float("inf")
            slow, absence = holds_up(ends, self._read_calls())
            text = f"no rank has moved for {stalled_s:.0f} s; rank {slow.rank} is {slow.place}"
            text += f", at {line}" if (line := line_of(slow.stack)) else ""
            text += f"; {absence}" if absence else ""
            self._alert(slow.rank, f"{text}; all are stopped after {self.deadline_s:g} s")

    def _alert(self, rank: int, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            self.run.event("alert", rank=rank, message=text)

    def _remember_memory(self) -> None:
        now = host.memory()
        if now and (self.most_memory is None or now.used_bytes > self.most_memory.used_bytes):
            self.most_memory = now


def _started(ends: list[End]) -> bool:
    """Whether any rank has said where it is: before, it imports."""
    return any(end.status for end in ends)


@contextmanager
def _requests() -> Generator[Requests, None, None]:
    """Count signals instead of dying of them; only a program's main thread gets any."""
    requests = Requests()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # such as SIGHUP under nohup
                before[number] = signal.signal(number, requests.on_signal)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    begun = _begun(run, began_at, done)
    return Outcome("failed", done, text), Failure(culprit.headline, raised, begun, done, full_in, final=final)


def _begun(run: Run, began_at: float, done: int) -> int:
    """Steps that were done when ranks that were started then began; `done` if they never did."""
    events = [*read_json_lines(run.events_file)]
    starts = [e["step"] for e in events if e["event"] == "start" and e["time"] >= round(began_at, 3)]
    return starts[-1] if starts else done
