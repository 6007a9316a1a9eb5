"""Who failed first, and where everybody was: one block of text from what the ranks left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.frames import SHOAL, is_user_file
from shoal.launch.errors import RankError, RankFiles, read_error, told_by
from shoal.observe import host
from shoal.observe.calls import Calls, read_all_calls
from shoal.observe.host import Memory
from shoal.observe.status import Status, read_status
from shoal.observe.verdict import Absence, Mismatch, find_absence, find_mismatch
from shoal.run import text_of
from shoal.world.meeting import ranks_text

COMPILING = re.compile(r"torch/(_dynamo/convert_frame|_inductor/(compile_fx|graph|scheduler))\.py")
MISMATCHED = ".MismatchError"  # of ranks that compare their calls: each raises the same
STACK = "(most recent call first):\n"  # before what faulthandler writes of a stack
WAITING = re.compile(r"torch/distributed/(?!checkpoint|elastic)|shoal/launch/(meeting|rendezvous)\.py")


class End(NamedTuple):
    """How a rank ended; `code` is None if it still ran when all were stopped, and `time` is since 1970."""

    rank: int
    code: int | None
    time: float
    status: Status | None
    error: RankError | None
    stack: str = ""
    gone: bool = False
    """its process is not there any more, and nobody saw how it ended"""
    stopped: bool = False
    """by SIGSTOP, as a debugger or Ctrl-Z does"""
    silent: bool = False
    """it did not write its stack when it was asked last, so that this is an earlier one, or none"""

    @property
    def signal(self) -> str | None:
        """The signal that killed it, if one did."""
        return signal.Signals(-self.code).name if self.code is not None and self.code < 0 else None

    @property
    def finished(self) -> bool:
        return self.code == 0 or (self.status is not None and self.status.state == "finished")

    @property
    def step(self) -> int:
        return self.status.step if self.status else 0

    @property
    def place(self) -> str:
        return self.status.describe() if self.status else "not started yet"


class Culprit(NamedTuple):
    """The rank that failed first: a headline that names it and the cause, and lines that explain."""

    rank: int
    headline: str
    details: list[str]
    mismatch: bool = False
    """ranks made different calls: what they have computed since is wrong"""


class Gone(NamedTuple):
    """A machine that is lost, with its ranks."""

    name: str
    ranks: Sequence[int]
    why: str
    heard: float = 0.0
    """when it was last, in seconds since 1970; 0: not known"""


class Scene(NamedTuple):
    """What a launcher saw: how ranks ended, most memory in use, kills for want of it, seconds of a stall."""

    ends: Sequence[End]
    memory: Memory | None = None
    oom_kills: int = 0
    stalled_s: float = 0.0
    orphaned: Sequence[int] = ()
    """ranks that ended with the process that had forked them, which was first"""
    gpus: Sequence[str] = ()
    """what speaks for leaving a GPU out"""
    calls: Mapping[int, Calls] = {}
    """what ranks called last"""
    gone: Gone | None = None
    """a machine that ended, or was not heard any more, while its ranks ran"""
    deadline_s: float = 0.0
    """after which a rank that waits for others is ended for it; 0: not known"""


def read_ends(
    folder: Path,
    codes: dict[int, tuple[int | None, float]],
    silent: Collection[int] = (),
    standing: Collection[int] | None = None,
) -> list[End]:
    """How each rank ended, from its files and its (exit code, time).

    Args:
        silent: ranks that did not write their stacks when they were asked last.
        standing: ranks whose process is stopped (SIGSTOP); left out: what this machine sees of the processes that ranks told.
    """
    ends = []
    for rank, (code, time) in sorted(codes.items()):
        files = RankFiles.of(folder, rank)
        status = read_status(files.status)
        error = read_error(files.error) or told_by(status)
        still = _process_state(status) == "T" if standing is None else rank in standing
        stopped = code is None and still
        stack = main_stack(text_of(files.stack))
        ends.append(End(rank, code, time, status, error, stack, stopped=stopped, silent=rank in silent))
    return ends


def report(scene: Scene, folder: Path) -> tuple[Culprit, str]:
    """The culprit, and the block of text that tells of it first and then of each other rank."""
    culprit = find_culprit(scene)
    own = next(end for end in scene.ends if end.rank == culprit.rank)
    where = (
        f"host {own.status.host}, process {own.status.pid}"
        if own.status
        else "before it could say where it was"
    )
    lines = [culprit.headline, f"  {where}; log {RankFiles.of(folder, own.rank).log}"]
    lines += [f"  {line}" for line in (*culprit.details, *scene.gpus)]
    lines += [f"{ranks_text(ranks)} {text}" for text, ranks in _others(scene.ends, culprit.rank).items()]
    lines.append(f"logs, statuses and errors of all ranks: {folder}/")
    return culprit, "\n".join(lines)


def own_report(folder: Path, error: RankError, size: int) -> str:
    """What a failing rank says itself when no launcher of ours watches: its error, or whose victim it is."""
    ends = [
        end
        for end in read_ends(folder, dict.fromkeys(range(size), (None, error.time)))
        if end.status is not None or end.rank == error.rank
    ]
    ends = [end._replace(gone=end.rank != error.rank and _is_gone(end)) for end in ends]
    if not error.secondary:
        ends = [end._replace(error=None) if end.rank != error.rank else end for end in ends]
    culprit, text = report(Scene(ends, calls=read_all_calls(folder, (end.rank for end in ends))), folder)
    if culprit.rank == error.rank:
        return text
    return f"rank {error.rank} was stopped, in step {error.step}, phase {error.phase}, because {text}"


def find_culprit(scene: Scene) -> Culprit:
    """The rank that failed first.

    In this order: another call than that of its group; an error of its own or a signal, whichever came first; an end
    before the others' end; an abort that no wait can have brought; being stuck; another abort; and if all only lost each
    other, the first to notice.
    """
    ends = scene.ends
    if mismatch := find_mismatch(scene.calls):
        return _differing(mismatch)
    if (gone := scene.gone) and not _failed_before(scene):
        return Culprit(gone.ranks[0], f"{gone.name} is gone, with {ranks_text(gone.ranks)}: {gone.why}", [])
    if scene.orphaned and not any(not end.error.secondary if end.error else _died(end) for end in ends):
        return _orphaned(scene)
    primary = [(end.error.time, end) for end in ends if end.error and not end.error.secondary]
    killed = [(end.time, end) for end in ends if not end.error and _died(end)]
    if primary or killed:
        end = min(primary + killed, key=lambda item: item[0])[1]
        return _failed(end, end.error) if end.error else _killed(end, scene)
    if gone := [end for end in ends if end.gone]:
        end = min(gone, key=lambda end: end.status.changed if end.status else 0.0)
        details = ["it left no error: somebody killed it, or the kernel did for want of memory"]
        return Culprit(end.rank, f"rank {end.rank} is gone, {end.place}", details)
    early = [end for end in ends if end.finished]
    running = [end for end in ends if not end.finished]
    if early and running:
        return _early(min(early, key=lambda end: end.step), max(running, key=lambda end: end.step))
    alive = [end for end in ends if end.code is None and not end.error]
    own = _own_aborts(scene)
    if alive and not own:
        return _stuck(scene)
    if aborted := own or [end for end in ends if end.signal and not end.error]:
        return _killed(min(aborted, key=lambda end: end.time), scene)
    if absence := find_absence(scene.calls):
        absence = _by_steps(absence, ends)
        end = next(end for end in ends if end.rank == absence.ranks[0])
        return Culprit(end.rank, f"rank {end.rank} held the others up, {end.place}", [absence.text])
    end = min((end for end in ends if end.error), key=lambda end: end.error.time if end.error else 0.0)
    assert end.error is not None, "ranks end by an error, a signal, an exit code, or not at all"
    return _failed(end, end.error)


def _orphaned(scene: Scene) -> Culprit:
    which = "the ranks" if len(scene.orphaned) == len(scene.ends) else ranks_text([*scene.orphaned])
    end = next(end for end in scene.ends if end.rank == scene.orphaned[0])
    headline = (
        f"the process that started {which} is gone, and they ended with it; rank {end.rank} was {end.place}"
    )
    details = ["somebody killed it, or the kernel did for want of memory", *_memory(scene)]
    return Culprit(end.rank, headline, details)


def _failed_before(scene: Scene) -> bool:
    """Whether a rank of another machine failed by itself, for which a lost machine may have been waiting."""
    there = [end for end in scene.ends if scene.gone is None or end.rank not in scene.gone.ranks]
    if any(not end.error.secondary if end.error else _died(end) for end in there):
        return True
    return scene.gone is not None and any(end.time < scene.gone.heard for end in _own_aborts(scene))


def behind(alive: Sequence[End]) -> End:
    """Which running rank holds the others up: the lowest step, not waiting for anyone, longest unchanged."""
    return min(
        alive, key=lambda end: (end.step, waits(end.stack), end.status.monotonic if end.status else 0.0)
    )


def waits(stack: str) -> bool:
    """Whether a main thread's stack is inside a wait for other ranks."""
    return bool(WAITING.search(stack))


def is_compiling(stack: str) -> bool:
    """Whether a main thread's stack is inside torch's compiler, which can take minutes."""
    return bool(COMPILING.search(stack))


def main_stack(text: str) -> str:
    """The last dump in a faulthandler file; each is of the main thread, which is the one that takes the signal."""
    return text.rpartition(STACK)[2]


def _died(end: End) -> bool:
    """By a signal or exit code, without an exception. SIGABRT is left out: NCCL's watchdog aborts victims."""
    return end.code not in (None, 0) and end.signal != "SIGABRT"


def _own_aborts(scene: Scene) -> list[End]:
    """Ranks that a SIGABRT ended while they did not wait: the watchdog's comes when one has waited for the deadline.

    It also aborts ranks whose peer is gone, at once; but then the peer's end is known, or that of its machine.
    """
    return [
        end
        for end in scene.ends
        if end.signal == "SIGABRT" and not end.error and end.status
        # of its own phases alone: peers of a victim say that they failed after it did
        if end.time - end.status.changed < scene.deadline_s / 2
    ]


def _failed(end: End, error: RankError) -> Culprit:
    where = f"in step {error.step}, phase {error.phase}"
    details = [f"at {error.frame}"] if error.frame else []
    details += error.notes
    if error.secondary:
        details.append(
            "this says only that another rank is gone or did not come; no rank left a cause of its own"
        )
    return Culprit(end.rank, f"rank {end.rank} failed {where}: {error.headline}", details)


def _killed(end: End, scene: Scene) -> Culprit:
    if not end.signal:
        details = ["it left the process by os._exit or the like, without an exception"]
        return Culprit(end.rank, f"rank {end.rank} ended with exit code {end.code} {end.place}", details)
    details = _memory(scene) if end.signal == "SIGKILL" else []
    if end.signal in ("SIGABRT", "SIGSEGV"):
        details.append("native code ended it; its log has the message, if there is one")
    return Culprit(end.rank, f"rank {end.rank} was killed by {end.signal} {end.place}", details)


def _memory(scene: Scene) -> list[str]:
    """What memory has to do with a SIGKILL."""
    used = f": host memory reached {scene.memory.describe()}" if scene.memory else ""
    if scene.oom_kills:
        return [
            f"the kernel's out-of-memory killer killed {scene.oom_kills} process(es) on this host meanwhile{used}"
        ]
    return [f"the kernel's out-of-memory killer is a common cause{used}; so is a scheduler's limit"]


def _is_gone(end: End) -> bool:
    """Whether a rank of this host that had not ended has no process."""
    status = end.status
    if status is None or status.state != "running" or status.host != socket.gethostname():
        return False
    try:
        os.kill(status.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return _process_state(status) == "Z"


def _process_state(status: Status | None) -> str:
    """The kernel's letter for a process of this host."""
    if status is None or status.host != socket.gethostname():
        return ""
    return host.process_state(status.pid)


def _early(end: End, other: End) -> Culprit:
    headline = f"rank {end.rank} finished after step {end.step} while rank {other.rank} was {other.place}"
    return Culprit(
        end.rank, headline, ["every rank must run the same steps, and the same collectives in each"]
    )


def _differing(mismatch: Mismatch) -> Culprit:
    details = [
        "every rank of a group must make the same calls in the same order; numbers since then are wrong"
    ]
    return Culprit(mismatch.rank, mismatch.text, details, mismatch=True)


def holds_up(ends: Sequence[End], calls: Mapping[int, Calls]) -> tuple[End, str]:
    """The running rank that holds the others up, and to which call it did not come, if that is known."""
    alive = [end for end in ends if end.code is None and not end.error and not end.finished]
    # one that gave up waiting, or whose peer did, still tells for whom it waited
    waited = [end.rank for end in ends if end in alive or (end.error and end.error.secondary)]
    absence = find_absence(calls, gone=[rank for rank in calls if rank not in waited])
    absence = _by_steps(absence, ends) if absence else None
    named = [end for end in alive if absence and end.rank in absence.ranks]
    still = [end for end in alive if end.stopped]
    found = behind(still or named or alive or ends)
    return found, absence.text if absence and found in named else ""


def _by_steps(absence: Absence, ends: Sequence[End]) -> Absence:
    """Who waits, in place of those that did not come, if they are steps ahead: they came to all calls of its step."""
    steps = {end.rank: end.step for end in ends if end.status}
    both = {*absence.ranks, absence.waiting}
    if not both <= steps.keys():
        return absence
    # of two that wait for each other, either may be the one
    mine = min(absence.ranks, key=steps.__getitem__) if absence.waiting in absence.ranks else absence.waiting
    ahead = sorted(both - {mine})
    if min(steps[rank] for rank in ahead) <= steps[mine]:
        return absence
    text = f"{absence.text}; but {ranks_text(ahead)} had done that step: rank {mine} made a call of its own"
    return Absence((mine,), text, ahead[0])


def line_of(stack: str) -> str:
    """`file:line in function` of the user's code, or else of shoal's, in a main thread's stack."""
    frames = _frames(stack)
    found = next((frame for frame in frames if is_user_file(frame[0])), None)
    found = found or next((frame for frame in frames if frame[0].startswith(SHOAL)), None)
    return f"{found[0]}:{found[1]} in {found[2]}" if found else ""


def _frames(stack: str) -> list[tuple[str, str, str]]:
    """File, line and function, innermost first, of what the worker runs."""
    return re.findall(
        r'File "([^"]+)", line (\d+) in (\S+)', stack.split(f'File "{SHOAL}/launch/worker.py"')[0]
    )


def _stuck(scene: Scene) -> Culprit:
    end, absence = holds_up(scene.ends, scene.calls)
    time = f"for {scene.stalled_s:.0f} s " if scene.stalled_s else ""
    headline = f"rank {end.rank} is stuck {time}{end.place}"
    details = [absence] * bool(absence) + ["its process is stopped (SIGSTOP)"] * end.stopped
    if end.silent:
        return Culprit(end.rank, headline, [*details, *["it did not say where it is"] * (not end.stopped)])
    details += [f"at {line}"] if (line := line_of(end.stack)) else []
    details += [f"  {path}:{line} in {name}" for path, line, name in _frames(end.stack)[:8]]
    return Culprit(end.rank, headline, details)


def _others(ends: Sequence[End], culprit: int) -> dict[str, list[int]]:
    """What became of the other ranks, those that share a fate together."""
    fates: dict[str, list[int]] = {}
    for end in ends:
        if end.rank != culprit:
            fates.setdefault(_fate(end), []).append(end.rank)
    return fates


def _fate(end: End) -> str:
    if end.finished:
        return end.place
    if end.error and end.error.type.endswith(MISMATCHED):
        return f"found it too, {end.place}"
    if end.error and not end.error.secondary:
        return f"failed too, {end.place}: {end.error.headline}"
    if end.error:
        return f"lost its peers {end.place}"
    if end.signal:
        return f"was killed by {end.signal} {end.place}"
    return f"is gone, {end.place}" if end.gone else f"was {end.place}"
