"""`RankError`: why one rank failed, as a file that the launcher, other ranks and people read."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.causes import causes
from shoal.frames import user_frame
from shoal.observe.status import WHY_BYTES, Status
from shoal.resilience.memory import is_out_of_memory
from shoal.run import write_whole

# What Gloo, NCCL and the store say on a rank whose peer has gone or does not come.
PEER_GONE = re.compile(
    r"connection (closed|reset) by peer|broken pipe|timed out waiting \d+ ?ms|connectfullmesh failed|"
    r"failed to recv, got 0 bytes|remote process exited|communicator was aborted|watchdog|"
    r"application timeout caused pair closure|wait timeout after|socket timeout|connection refused",
    re.IGNORECASE,
)


class RankFiles(NamedTuple):
    """The files of one rank in a run's `ranks` folder."""

    log: Path
    status: Path
    error: Path
    stack: Path
    calls: Path

    @classmethod
    def of(cls, folder: Path, rank: int) -> RankFiles:
        names = ("log", "status", "error.json", "stack", "calls")
        return cls(*(folder / f"{rank}.{name}" for name in names))

    def clear(self) -> None:
        """Remove what an earlier run left; logs grow on."""
        for path in (self.status, self.error, self.stack, self.calls):
            path.unlink(missing_ok=True)


_TOLD = ("message", "time", "secondary", "out_of_memory")


class RankError(NamedTuple):
    """One rank's exception; `secondary` guesses that it tells of another rank's end; `time` since 1970."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    type: str
    message: str
    frame: str
    traceback: str
    time: float
    secondary: bool
    notes: Sequence[str] = ()
    """lines that explain it, which were added where it was raised"""
    out_of_memory: bool = False

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(self._asdict(), indent=1))

    def brief(self) -> str:
        """What fits into the rank's status, which needs no room on the disk: all but the traceback, and cut."""
        told = {name: getattr(self, name) for name in _TOLD}
        told |= {
            "notes": [note[:200] for note in self.notes[:2]],
            "type": self.type[:200],
            "frame": self.frame[:200],
        }
        while len(text := json.dumps(told, ensure_ascii=False).encode(errors="replace")) > WHY_BYTES:
            longest = max(("message", "frame", "type"), key=lambda name: len(told[name]))
            told[longest] = told[longest][: len(told[longest]) * 3 // 4]
        return text.decode()

    @property
    def headline(self) -> str:
        """Type and first lines of the message: what there is room for in a report."""
        lines = self.message.strip().splitlines()
        return f"{self.type}: " + "\n  ".join(lines[:6]) if lines else self.type


def read_error(path: Path) -> RankError | None:
    """The error in a file; None if there is none or it was written by another version."""
    try:
        return RankError(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, json.JSONDecodeError):
        return None


def told_by(status: Status | None) -> RankError | None:
    """The error of a rank that could not write its file, as its status tells it; None if it tells of none."""
    if status is None or status.state != "failed" or not status.why:
        return None
    place = {name: getattr(status, name) for name in ("rank", "host", "pid", "step", "phase")}
    try:
        return RankError(**place, traceback="", **json.loads(status.why))
    except (TypeError, json.JSONDecodeError):
        return None


def describe(error: BaseException, status: Status) -> RankError:
    """What to write about an exception, on the rank that raised it."""
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return RankError(
        rank=status.rank,
        host=status.host,
        pid=os.getpid(),
        step=status.step,
        phase=status.phase,
        type=name,
        message=str(error),
        frame=user_frame(error),
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        secondary=is_secondary(error),
        notes=getattr(error, "__notes__", ()),
        out_of_memory=is_out_of_memory(error),
    )


def is_secondary(error: BaseException) -> bool:
    """Whether an exception, or what caused it, only says that another rank is gone or did not come.

    Example:
        >>> is_secondary(RuntimeError("[/gloo/pair.cc] Connection closed by peer [127.0.0.1]:3"))
        True
    """
    from shoal.world.meeting import DeadlineError  # not at the top: the launcher reads errors without torch

    return any(
        isinstance(link, DeadlineError) or (isinstance(link, RuntimeError) and PEER_GONE.search(str(link)))
        for link in causes(error)
    )
