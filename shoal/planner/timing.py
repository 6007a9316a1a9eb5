"""What a step of a plan takes, from the records of its ranks: seconds with how far they may be off, where they go, and what they
are worth.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.planner.cost import Costs
from shoal.planner.replay import Part, RankTime, replay
from shoal.planner.trace import Trace
from shoal.train.rates import Rates


class Timing(NamedTuple):
    """A step's time."""

    seconds: float
    low_s: float
    high_s: float
    """between which it is thought to be"""
    why: str
    """what the times of kernels are from"""
    unit: str
    """what is trained on: "tokens" or "samples" """
    units_per_s: float
    """of all devices together"""
    mfu: float | None
    ranks: list[RankTime]
    """of each place in the pipeline; where not all micro-batches were replayed, parts are those of all, timelines are not"""
    micro_batches: tuple[int, int]
    """of a step, and how many of them were replayed"""

    @property
    def slowest(self) -> RankTime:
        """The rank that waits least."""
        waits = (Part.BUBBLE, Part.EXPOSED, Part.HOST)
        return max(self.ranks, key=lambda rank: sum(s for part, s in rank.parts.items() if part not in waits))

    @property
    def bound_by(self) -> Part:
        """What takes most of the step of the slowest rank."""
        return max(self.slowest.parts, key=self.slowest.parts.__getitem__)


def time_of(
    traces: dict[int, Trace],
    costs: Costs,
    rates: Rates,
    micro_batches: tuple[int, int],
    *,
    as_graph: bool = False,
) -> Timing:
    """Replay the records of a plan's ranks.

    Args:
        micro_batches: of a step, and how many of them were recorded; the others are alike.
        as_graph: as `replay` has it.
    """
    count, recorded = micro_batches
    found = replay(traces, costs, recorded, as_graph=as_graph)
    more = (count - recorded) * found.per_micro_batch_s
    seconds = found.seconds + more
    sure = costs.sureness
    return Timing(
        seconds,
        seconds * (1 - sure.low),
        seconds * (1 + sure.high),
        sure.why,
        rates.unit,
        rates.usual_weight / seconds,
        rates.mfu(seconds),
        [_longer(rank, more) for rank in found.ranks],
        micro_batches,
    )


def _longer(rank: RankTime, more: float) -> RankTime:
    """With micro-batches beyond those that were replayed, which are spent as the others but for the update."""
    if not more:
        return rank
    spread = {part: seconds for part, seconds in rank.parts.items() if part is not Part.UPDATE}
    whole = sum(spread.values()) or 1.0
    parts = {
        part: seconds + (more * seconds / whole if part in spread else 0.0)
        for part, seconds in rank.parts.items()
    }
    return rank._replace(parts=parts)
