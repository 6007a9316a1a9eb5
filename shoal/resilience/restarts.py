"""When a run that failed is started again, and when that would only fail again."""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """How a generation of ranks ended."""

    headline: str
    """the first line of the report, which names rank, step and cause"""
    raised: bool
    """by an exception of the program, and not by a kill, an exit or a hang"""
    begun: int
    """steps that were done when the generation began"""
    done: int
    """steps that were done on all ranks when it ended"""
    out_of_memory: str | None = None
    """the phase in which a rank had no memory left, if that was it"""
    remedied: bool = False
    """the next generation will not do what this one failed by"""
    final: str = ""
    """why it is no use to go on from what was kept in memory"""


class Restarts:
    """The generations of a run, and whether there is to be another one.

    What killed or stopped a rank from outside may be over; an exception is the program's, and comes again unless it has
    to do with the moment. So an exception is tried once more only after steps that went well, and one that ends a run
    twice at the same place ends it for good. Where what a run failed by is remedied, it is tried again in any case.

    Args:
        most: restarts in a row that took no step further than all before.

    Example:
        >>> restarts = Restarts(most=1)
        >>> kill = Failure("rank 1 was killed by SIGKILL in step 3", raised=False, begun=0, done=3)
        >>> restarts.refuse(kill), restarts.refuse(kill._replace(headline="rank 0 was killed by SIGKILL in step 3"))
        (None, '1 restart in a row took the run no further than step 3 (run.restarts)')
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.number = 0
        """restarts so far"""
        self._seen: set[str] = set()
        self._furthest = -1
        self._in_a_row = 0

    def refuse(self, failure: Failure) -> str | None:
        """Why there is no restart after a failure; None if there is to be one, which is then counted."""
        again = failure.headline in self._seen
        self._seen.add(failure.headline)
        if failure.done > self._furthest:
            self._furthest, self._in_a_row = failure.done, 0
        if not self._most:
            return "run.restarts = 0"
        if failure.final:
            return failure.final
        if failure.remedied:
            self.number += 1
            return None
        if failure.raised and failure.done <= failure.begun:
            return "no step was done before the program raised it, so it would again"
        if failure.raised and again:
            return "it failed in the same way at the same place after a restart"
        if self._in_a_row >= self._most:
            times = "1 restart" if self._most == 1 else f"{self._most} restarts"
            return f"{times} in a row took the run no further than step {self._furthest} (run.restarts)"
        self._in_a_row += 1
        self.number += 1
        return None
