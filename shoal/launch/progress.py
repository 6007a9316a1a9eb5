"""What a launcher reads in the ranks' files while they run: a stall, other calls than those of the group, a slow rank.

Ranks pay nothing for it, and it works while they are blocked, stopped or gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.launch.failure import End
from shoal.observe.calls import Calls
from shoal.observe.pace import Pace, Slow
from shoal.observe.verdict import Mismatch, find_mismatch

STEP_PHASES = ("data", "forward", "reduce", "update", "copy", "compare")
STALL_S = 8.0  # at least, before a rank is named: it is by the tenth second
USUAL = 10.0  # times a step, or the longest that ranks usually stay in one phase
WARM_UP = 2  # steps that may compile
CALLS_S = 2.0  # between looks at calls


@dataclass(eq=False)
class Quiet:
    """How long no rank moves from one phase to the next in the steps of a run, and so what is too long for it.

    Only the phases of a step are judged: an evaluation, a save or what is compiled in the first steps take what they take.

    Example:
        >>> Quiet().limit_s
        inf
    """

    limit_s: float = float("inf")
    """seconds without a move after which a rank is named"""
    _began: tuple[int, float] | None = None
    """step in which the ranks began, and when"""
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    _last: float = 0.0

    def look(self, ends: Sequence[End], stalled_s: float, now: float) -> None:
        """Take in where ranks are, and for how long none has moved."""
        running = [end.status for end in ends if end.status is not None and end.status.state == "running"]
        step = min((status.step for status in running), default=0)
        if len(running) < len(ends) or any(status.phase not in STEP_PHASES for status in running):
            self.limit_s, self._last = float("inf"), 0.0
            return
        if self._began is None or step < self._began[0]:  # the run may have gone back
            self._began = step, now
        first, began = self._began
        if stalled_s < self._last:
            self._seen.append(self._last)
        self._last = stalled_s
        if step < first + WARM_UP:
            return
        longest = sorted(self._seen)[int(0.99 * len(self._seen))] if self._seen else 0.0
        a_step = (now - stalled_s - began) / (step - first)
        self.limit_s = max(STALL_S, USUAL * max(longest, a_step))


@dataclass(eq=False)
class CallWatch:
    """What running ranks call, compared every now and then."""

    stages: Sequence[Sequence[int]]
    """ranks that do the same work, together"""
    every_s: float = CALLS_S
    _next: float = 0.0
    _suspected: Mismatch | None = None
    _pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self._pace = Pace(self.stages)

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def look(self, calls: Mapping[int, Calls], ends: Sequence[End]) -> tuple[bool, list[Slow]]:
        """Whether ranks made different calls, found twice in a row; and ranks that are slow."""
        found = find_mismatch(calls)
        is_sure = found is not None and self._suspected is not None
        self._suspected = found
        # a suspicion is looked at again at once: what is true stays
        self._next = time.monotonic() + (0.0 if found else self.every_s)
        statuses = [end.status for end in ends if end.status is not None]
        if len(statuses) < len(ends) or any(status.phase not in STEP_PHASES for status in statuses):
            return is_sure, []
        data_s = {status.rank: status.data_s for status in statuses}
        step = min(status.step for status in statuses)
        return is_sure, self._pace.look(calls, step, time.monotonic(), data_s)
