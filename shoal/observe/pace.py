"""Which rank is slower than those that do the same work: the one for which the others wait in their collectives.

Times are those of the host, at which ranks come to their calls. On GPUs a slow device is not seen in them; a slow loader or
program is.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.observe.calls import Calls
from shoal.observe.verdict import groups_of, numbered

SLOW = 1.4  # times the own time of most others, in each of WINDOWS windows in a row
WINDOWS = 3
WINDOW_STEPS = 20
LEAST_S = 0.02  # a step, below which it is not worth a word: rank 0 writes and prints
LEAST = 0.05  # of a window that a rank is held to work by itself, whatever is counted as waiting


class Slow(NamedTuple):
    """A rank for which the others of its stage waited, window after window; `ratio` is its own time over theirs."""

    rank: int
    ratio: float
    reason: str


class Pace:
    """Own times of ranks, from when they come to their calls: who comes last is waited for.

    Args:
        stages: ranks that do the same work, together.
    """

    def __init__(self, stages: Sequence[Sequence[int]]) -> None:
        self._stages = stages
        self._compared: dict[str, int] = {}
        self._waited: defaultdict[int, float] = defaultdict(float)
        self._began: tuple[int, float, dict[int, float]] | None = None
        self._streak: Counter[int] = Counter()
        self._told: set[int] = set()

    def look(
        self, calls: Mapping[int, Calls], step: int, now: float, data_s: Mapping[int, float]
    ) -> list[Slow]:
        """Take in what was called since the last look; the ranks that are slow and were not told of.

        Args:
            step: that all ranks have done.
            data_s: of each rank, seconds that it has waited for data.
        """
        self._count(calls)
        if self._began is None or step < self._began[0]:  # the run may have gone back
            self._begin(step, now, data_s)
            return []
        first, began, data_before = self._began
        if step - first < WINDOW_STEPS:
            return []
        data = {rank: seconds - data_before.get(rank, 0.0) for rank, seconds in data_s.items()}
        found = [slow for stage in self._stages for slow in self._judge(stage, now - began, data)]
        self._begin(step, now, data_s)
        return found

    def _begin(self, step: int, now: float, data_s: Mapping[int, float]) -> None:
        self._began = step, now, dict(data_s)
        self._waited.clear()

    def _count(self, calls: Mapping[int, Calls]) -> None:
        for group in groups_of(calls):
            compared = self._compared.get(group.name, 0)
            for number, made in numbered(group, calls).items():
                if number > compared and len(made) == len(group.ranks):
                    latest = max(call.time for _, call in made)
                    for rank, call in made:
                        self._waited[rank] += latest - call.time
                    self._compared[group.name] = max(self._compared.get(group.name, 0), number)

    def _judge(self, stage: Sequence[int], seconds: float, data: Mapping[int, float]) -> Iterator[Slow]:
        own = {rank: max(LEAST * seconds, seconds - self._waited[rank]) for rank in stage}
        for rank in stage if len(stage) > 1 else ():
            others = statistics.median(own[other] for other in stage if other != rank)
            ratio = own[rank] / others
            is_slow = ratio > SLOW and own[rank] - others > LEAST_S * WINDOW_STEPS
            self._streak[rank] = self._streak[rank] + 1 if is_slow else 0
            if self._streak[rank] >= WINDOWS and rank not in self._told:
                self._told.add(rank)
                usual = statistics.median(data.get(other, 0.0) for other in stage if other != rank)
                by_data = data.get(rank, 0.0) - usual > 0.5 * (own[rank] - others)
                yield Slow(rank, ratio, "it waits for its data" if by_data else "its own work takes longer")
