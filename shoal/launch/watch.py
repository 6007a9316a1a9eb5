"""`Watch`: what the launcher does while ranks run, until all have ended well or had to be stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shoal.launch.errors import RankFiles
from shoal.launch.failure import End, Scene, holds_up, is_compiling, line_of, read_ends
from shoal.launch.progress import CallWatch, Quiet
from shoal.launch.ranks import Crew
from shoal.launch.worker import SAME_STOP_S
from shoal.observe import host
from shoal.observe.calls import Calls, read_all_calls
from shoal.observe.host import Memory
from shoal.observe.verdict import find_mismatch
from shoal.run import Run, size_of
from shoal.world.meeting import ranks_text

SETTLE_S = 2.0  # how long other ranks may take to end by themselves, once one has failed
STACK_S = 0.3  # how long a rank takes to write its stack on SIGUSR1
START_S = 120.0  # importing torch from a busy network disk can take a minute
POLL_S = 0.1
STOPPED_S = 2.5  # that a process is stopped, before it is taken to stay so
STOPPED_LOOKS = 4  # in which it is so, at least: after a suspension of all, the launcher may go on first
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(eq=False)
class Requests:
    """Signals that the launcher got; a person's Ctrl-C and a scheduler's copy of it count once."""

    count: int = 0
    last: int = 0
    """the number of the newest"""
    _last: float = -SAME_STOP_S

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > 0.2:
            self.count += 1
            self.last = number
        self._last = now


@contextmanager
def counted_requests() -> Generator[Requests, None, None]:
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


@dataclass(eq=False)
class Watch:
    """What the launcher does while ranks run: pass on signals, notice an end or a stall, remember memory."""

    run: Run
    nursery: Crew
    requests: Requests
    deadline_s: float
    calls: CallWatch
    folder: Path
    """where the ranks' files are read"""
    is_here: bool = True
    """whether all ranks are on this machine, whose memory then tells why the kernel killed one"""
    leaves_room: Callable[[], bool] = lambda: False
    """asked whether ranks are to stop in an orderly way, since there will be more or fewer of them"""
    quiet: Quiet = field(default_factory=Quiet)
    passed_on: int = 0
    made_room: bool = False
    warned: float = 0.0
    stopped: dict[int, tuple[int, float]] = field(default_factory=dict)
    """at how many looks in a row the process of a rank was stopped, and since when"""
    silent: Sequence[int] = ()
    """ranks that did not write their stacks when they were asked last"""
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
            if self.nursery.gone is not None:
                return self._stop_all(0.0)
            if any(code for code, _ in self.nursery.ended.values()) or self.passed_on > 1:
                return self._stop_all(0.0)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + min(0.5, self.deadline_s / 20)
                self._remember_memory()
                ends = self.ends()
                if self._failed(ends) or self._calls_differ(ends):
                    return self._stop_all(0.0)
                stalled = self._stalled_s(ends)
                if self._stand_still(ends):
                    return self._stop_all(stalled)
                if stalled > self.deadline_s and all(end.finished for end in ends):
                    self._end_the_rest()
                    break
                if stalled > (self.deadline_s if _started(ends) else max(START_S, self.deadline_s)):
                    return self._stop_all(stalled)
                self._warn(ends, stalled)
        return None if self._ended_well() else self._stop_all(0.0)

    def _end_the_rest(self) -> None:
        """Kill ranks that have done all their work and only do not end, by which nothing is lost."""
        if rest := self.nursery.alive:  # else the last has just ended
            text = f"{ranks_text(rest)} finished and did not end within {self.deadline_s:g} s: killed"
            self._alert(rest[0], text)
            self.nursery.send(signal.SIGKILL)

    def ends(self) -> list[End]:
        return read_ends(self.folder, self.nursery.codes(), self.silent, self.nursery.standing())

    def _ended_well(self) -> bool:
        if self.nursery.lost or self.nursery.gone or any(code for code, _ in self.nursery.ended.values()):
            return False
        return find_mismatch(self._read_calls()) is None  # after the last look

    def _failed(self, ends: list[End]) -> bool:
        """Whether a rank said that it failed: leaving a process group on GPUs can take it for ever when others wait."""
        return any(end.status is not None and end.status.state == "failed" for end in ends)

    def _stand_still(self, ends: list[End]) -> bool:
        """Whether the process of a rank is stopped (SIGSTOP) and stays so: nobody has to wait for the deadline to know it."""
        now, before = time.monotonic(), self.stopped
        self.stopped = {}
        for end in ends:
            if end.stopped and not end.finished:
                looks, since = before.get(end.rank, (0, now))
                self.stopped[end.rank] = looks + 1, since
        return any(
            looks >= STOPPED_LOOKS and now - since >= STOPPED_S for looks, since in self.stopped.values()
        )

    def _calls_differ(self, ends: list[End]) -> bool:
        """Whether ranks of a group made different calls; tells of slow ranks by the way."""
        if not self.calls.is_due:
            return False
        differ, slow = self.calls.look(self._read_calls(), ends)
        for rank, ratio, reason in slow:
            self._alert(rank, f"rank {rank} is slow: others wait for it, {reason} ({ratio:.1f} times theirs)")
        return differ

    def _read_calls(self) -> dict[int, Calls]:
        return read_all_calls(self.folder, range(self.nursery.ranks))

    def _pass_on(self) -> None:
        all_there = len(self.nursery.pids) == self.nursery.ranks
        if self.requests.count > self.passed_on and (all_there or self.requests.count > 1):
            self.passed_on = self.requests.count
            if self.passed_on == 1:
                # a machine that was asked to stop the run tells of no number
                name = signal.Signals(self.requests.last).name if self.requests.last else "asked to stop"
                print(
                    f"{name}: the ranks finish their step and save; a second one kills them",
                    file=sys.stderr,
                    flush=True,
                )
            if self.passed_on > 1 or not self.made_room:  # a second SIGTERM would end ranks at once
                self.nursery.send(signal.SIGTERM if self.passed_on == 1 else signal.SIGKILL)
        elif all_there and not self.made_room and not self.passed_on and self.leaves_room():
            self.made_room = True
            self.nursery.send(signal.SIGTERM)

    def _stop_all(self, stalled_s: float) -> Scene:
        """Let the others end by themselves for a moment, take the stacks of those that do not, and kill."""
        until = time.monotonic() + (0.0 if stalled_s or self.passed_on > 1 else SETTLE_S)
        while self.nursery.running and time.monotonic() < until:
            self.nursery.listen(max(0.0, until - time.monotonic()))
        self._take_stacks()
        self._await_word()
        oom_kills = host.oom_kills() - self.oom_before if self.is_here else 0
        calls = self._read_calls()
        orphaned, gone = self.nursery.orphaned, self.nursery.gone
        scene = Scene(
            self.ends(),
            self.most_memory,
            oom_kills,
            stalled_s,
            orphaned,
            calls=calls,
            gone=gone,
            deadline_s=self.deadline_s,
        )
        self.nursery.send(signal.SIGKILL)
        return scene

    def _await_word(self) -> None:
        """Wait until machines that are not heard tell how their ranks are, or are lost.

        What was last known of such ranks is from before the failure: they would be taken for stuck, though they may have
        ended, and one of them first. It costs no time, since their ranks have to be stopped before others begin.
        """
        if self.nursery.unheard:
            while self.nursery.unheard:
                self.nursery.listen(POLL_S)
            self._take_stacks()

    def _take_stacks(self) -> None:
        """Let ranks write their stacks; one that does not, since its main thread takes no signal, is remembered for it."""
        if alive := self.nursery.alive:
            before = self._written(alive)
            self.nursery.send(signal.SIGUSR1)
            self.nursery.pause(STACK_S)
            after = self._written(alive)
            self.silent = [rank for rank in alive if before[rank] == after[rank]]

    def _written(self, ranks: Sequence[int]) -> dict[int, int]:
        """Bytes of the stacks of each rank."""
        return {rank: size_of(RankFiles.of(self.folder, rank).stack) or 0 for rank in ranks}

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
            text += f", at {line}" if not slow.silent and (line := line_of(slow.stack)) else ""
            text += f"; {absence}" if absence else ""
            self._alert(slow.rank, f"{text}; all are stopped after {self.deadline_s:g} s")

    def _alert(self, rank: int, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            self.run.event("alert", rank=rank, message=text)

    def _remember_memory(self) -> None:
        now = host.memory() if self.is_here else None
        if now and (self.most_memory is None or now.used_bytes > self.most_memory.used_bytes):
            self.most_memory = now


def _started(ends: list[End]) -> bool:
    """Whether any rank has said where it is: before, it imports."""
    return any(end.status for end in ends)
