"""`disturb`: run a job of faults_peers.py under a system, do something to it, and wait until it has ended or nothing goes on."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import sub
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults_peers_jobs import (
    Ask,
    Process,
    System,
    free_port,
    leading_node,
    lighthouse,
    processes_of,
    redone_by_shoal,
    rows_of,
    said_by,
    saved,
    struck_at,
)
from benchmarks.faults_peers_judge import (
    CAUSES,
    Naming,
    Row,
    done_at,
    longest_wait_s,
    naming,
    rank_pattern,
    redone,
    without_paths,
)
from tests.launch.machines import children_of

POLL_S = 0.02
START_S = 90.0  # until the first step
LEFT_S = 5.0  # how long after the end processes may be there
END_S = 20.0  # from the last step to the end of the launchers
TERM_S = 45.0  # torchrun kills what does not end within 30 s


class Found(NamedTuple):
    """What came of a disturbed job."""

    next_step_s: float | None
    redone: int
    named: str
    line: str
    """that names who failed"""
    left: int
    """processes: some seconds after the end, or of a killed launcher some seconds after the kill"""
    ended_s: float | None
    """seconds from the fault to the end of all launchers; None: they had to be stopped"""
    gone_s: float | None
    """and of all processes"""
    codes: list[int | None]
    """exit codes of the launchers"""
    struck_after: int
    """steps that were done when it was struck"""
    done: int
    """steps that were done in the end"""
    saved: int
    """steps that the newest checkpoint on disk has"""
    step_s: float | None
    """the median of the steps before the fault"""


class _Job:
    """The launchers of a job, and what was done to them."""

    def __init__(self, system: System, ask: Ask, kind: str, after: int) -> None:
        self.system, self.ask, self.kind, self.after = system, ask, kind, after
        self.port = free_port()
        self.light = lighthouse(ask.folder, self.port) if system.family == "torchft" else None
        self.nodes: dict[int, Process] = {}
        for node in range(system.nodes):
            self.nodes[node] = system.start(ask, node, self.port)
        self.killed: dict[int, list[int]] = {}
        """of each machine whose launcher was killed: processes that it had started"""
        self.who = rank_pattern(1)
        self.struck: float | None = None
        self.orphans = 0
        self._counted = False
        self.said_before: dict[str, str] = {}
        """what was printed until it was struck"""

    def look(self) -> float | None:
        """Strike if it is time, and start again who was killed; when it was struck."""
        before = said_by(self.ask.folder) if self.struck is None else {}
        if self.struck is None and self.ask.fault:
            self.struck = struck_at(self.ask.folder)
        elif (
            self.struck is None and self.kind and done_at(rows_of(self.ask.folder), time.time()) >= self.after
        ):
            self._strike()
        if self.struck is None:
            self.said_before = before
        for node in [node for node, process in self.nodes.items() if process.poll() == -signal.SIGKILL]:
            if node in self.killed:
                self.nodes[node] = self.system.start(self.ask, node, self.port)
        if (
            self.killed
            and not self._counted
            and self.struck is not None
            and time.time() > self.struck + LEFT_S
        ):
            self._counted = True
            self.orphans = sum(_is_alive(pid) for below in self.killed.values() for pid in below)
        return self.struck

    def _strike(self) -> None:
        pids = {node: process.pid for node, process in self.nodes.items()}
        self.struck = time.time()
        if self.kind == "term":
            for pid in pids.values():
                os.kill(pid, signal.SIGTERM)
            return
        leads = leading_node(self.ask.folder, pids)
        node = leads if "leading" in self.kind else 1 - leads
        self.killed[node] = children_of(pids[node])
        self.who = "|".join(
            [rf"\b{pids[node]}\b|_{pids[node]}_", *map(rank_pattern, _ranks_of(self.killed[node]))]
        )
        for pid in [pids[node], *(self.killed[node] if "machine" in self.kind else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def is_to_come_back(self) -> bool:
        return any(self.nodes[node].poll() == -signal.SIGKILL for node in self.killed)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.nodes.values()]

    def end(self) -> None:
        """Kill all that is left."""
        for pid in processes_of(self.ask.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10.0
        while None in self.codes() and time.monotonic() < until:
            time.sleep(POLL_S)
        if self.light is not None:
            self.light.kill()
            self.light.wait()


def disturb(system: System, ask: Ask, kind: str, after: int, *, limit_s: float) -> Found:
    """Run a job to its end, or until it has done nothing new for `limit_s` after the fault."""
    job = _Job(system, ask, kind, after)
    try:
        ended_at = _until_over(job, limit_s)
        codes = job.codes()
        left, gone_at = _left(job) if ended_at is not None else (0, None)
        return _found(job, codes, max(left, job.orphans), ended_at, gone_at)
    finally:
        job.end()


def _until_over(job: _Job, limit_s: float) -> float | None:
    """When all launchers had ended; None if nothing went on any more."""
    began = time.time()
    while True:
        struck = job.look()
        if None not in job.codes() and not job.is_to_come_back:
            return time.time()
        done, newest_at = _newest(rows_of(job.ask.folder))
        quiet_since = max(began + START_S - limit_s, newest_at, struck or 0.0)
        if done >= job.ask.steps:
            quiet_since = newest_at + END_S - limit_s
        if job.kind == "term" and struck is not None:
            quiet_since = struck + TERM_S - limit_s
        if time.time() - quiet_since > limit_s:
            return None
        time.sleep(POLL_S)


def _newest(rows: Sequence[Row]) -> tuple[int, float]:
    """The last step that was done, and when it was done first."""
    done, when = 0, 0.0
    for row in rows:
        if row.step > done:
            done, when = row.step, row.time
    return done, when


def _left(job: _Job) -> tuple[int, float | None]:
    """Processes that are there after some seconds; and when the last was gone."""
    until = time.monotonic() + LEFT_S
    while True:
        there = set(processes_of(job.ask.folder)) - ({job.light.pid} if job.light is not None else set())
        if not there:
            return 0, time.time()
        if time.monotonic() > until:
            return len(there), None
        time.sleep(POLL_S)


def _found(
    job: _Job, codes: list[int | None], left: int, ended_at: float | None, gone_at: float | None
) -> Found:
    folder, steps = job.ask.folder, job.ask.steps
    rows = rows_of(folder)
    struck = job.struck if job.struck is not None else time.time()
    done = max((row.step for row in rows), default=0)
    told = _naming(job) if job.kind not in ("", "term") else Naming("")
    before = [row.time for row in rows if row.time <= struck and row.who == rows[0].who]
    return Found(
        next_step_s=longest_wait_s(rows, struck, steps) if job.struck is not None else None,
        redone=redone_by_shoal(folder) if job.system.family == "shoal" else redone(rows),
        named=told.verdict,
        line=without_paths(told.line),
        left=left,
        ended_s=None if ended_at is None else round(ended_at - struck, 3),
        gone_s=None if gone_at is None else round(gone_at - struck, 3),
        codes=codes,
        struck_after=done_at(rows, struck),
        done=done,
        saved=saved(folder),
        step_s=round(statistics.median(map(sub, before[1:], before)), 4) if len(before) > 1 else None,
    )


def _naming(job: _Job) -> Naming:
    """By what launchers printed since; whatever the torchrun of a torchft replica says of a failure is of that replica."""
    said = {
        name: text[len(job.said_before.get(name, "")) :] for name, text in said_by(job.ask.folder).items()
    }
    kind = job.kind if job.kind in CAUSES else "agent"
    if job.system.family == "torchft":
        own = naming(said.pop("1", ""), kind, "")
        return own if own.line else naming("\n".join(said.values()), kind, "replica_1")
    return naming("\n".join(said.values()), kind, job.who)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _ranks_of(pids: Sequence[int]) -> list[int]:
    """Ranks that processes were started as, where their environment says it."""
    ranks = []
    for pid in pids:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            ranks += [int(word.removeprefix("RANK=")) for word in words if word.startswith("RANK=")]
    return ranks
