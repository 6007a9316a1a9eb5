"""Loss spikes: the run goes back to before one, and goes on with the data after it.

[Note: a function of losses] Whether a step's loss is a spike depends on the losses before it alone, and what is skipped on the
step and the job: not on the plan, nor on where checkpoints are. The steps between the checkpoint that is loaded and the skipped
window are taken again as they were. So the same job gives the same numbers, also when it is stopped anywhere and goes on: a run
that goes on from a checkpoint of before it went back meets the spike again, and goes back again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint.folder import Checkpoint
from shoal.job import Train

MOST = 16  # windows that a run skips, after which it is lost
LEAST_SPREAD = 1e-3  # of the median, so that the noise of a flat course is no spike
NORMAL = 1.4826  # from the median of distances to the standard deviation, for a normal distribution


class Spike(NamedTuple):
    """A loss far above those before it."""

    step: int
    """that had it, from 0"""
    loss: float
    score: float
    """how many standard deviations, as the median of distances tells it, it is above the median"""
    begin: int
    """the first step whose data is skipped; the last one is `step`"""

    @property
    def length(self) -> int:
        return self.step - self.begin + 1


class SpikeError(Exception):
    """A spike was seen; raised on all ranks alike, since all see the same losses."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(f"loss {spike.loss:g} of step {spike.step + 1} is a spike")
        self.spike = spike


def is_before(checkpoint: Checkpoint, step: int, skips: list[tuple[int, int]]) -> bool:
    """Whether a checkpoint is of a step or before, and has seen nothing of what is skipped by now: some that have are there."""
    known = checkpoint.manifest.get("skipped_data", [])
    gone = [[begin, length] for begin, length in skips if begin < checkpoint.step]
    return checkpoint.step <= step and all(skip in known for skip in gone)


class Span(NamedTuple):
    """Steps whose data follow each other: `count` from `step` on, with the data of `data` on."""

    step: int
    data: int
    count: int


class Spikes:
    """The losses that a spike is told from, and the windows of data that are skipped. Part of a run's state."""

    def __init__(self, train: Train) -> None:
        self._threshold, self._window, self._rewind = train.spike, train.spike_window, train.spike_rewind
        self._losses = torch.full((self._window,), math.nan, dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.int64)
        self._skips = torch.full((MOST, 2), -1, dtype=torch.int64)

    def take(self, step: int, loss: float) -> None:
        """Take in the loss of a step.

        Raises:
            SpikeError: it is a spike.
        """
        if not math.isfinite(loss):  # the step was skipped, which is another matter
            return
        count = int(self._count)
        if count >= self._window and step >= self._quiet_until:
            score = score_of(loss, self._losses)
            if score > self._threshold:
                raise SpikeError(Spike(step, loss, score, max(0, step - self._rewind)))
        self._losses[count % self._window] = loss
        self._count += 1

    @property
    def skips(self) -> list[tuple[int, int]]:
        """(step, length): from this step on, data is so many steps further than before."""
        return [(begin, length) for begin, length in self._skips.tolist() if length > 0]

    def skip(self, spike: Spike, before: list[tuple[int, int]]) -> None:
        """Have the data of a spike skipped, and what was skipped `before`; the state is now one of before the spike.

        Raises:
            FloatingPointError: it is one too many.
        """
        skips = [*before, (spike.begin, spike.length)]
        if len(skips) > MOST:
            raise FloatingPointError(
                f"the loss of step {spike.step + 1} is a spike ({spike.loss:g}), the {len(skips)}th: this is no matter of data. "
                "Try a lower optimizer.lr or a longer optimizer.warmup, or in a new run.dir a higher train.spike"
            )
        self._skips[: len(skips)] = torch.tensor(skips)

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        """The steps from `first` until before `stop`, with their data."""
        return spans(self.skips, first, stop)

    def state(self) -> dict[str, Tensor]:
        """Tensors that are saved and loaded in place."""
        return {"spikes.losses": self._losses, "spikes.count": self._count, "spikes.skips": self._skips}

    @property
    def _quiet_until(self) -> int:
        """After going back no step up to that of the spike is judged: checkpoints of before may be gone."""
        return max((begin + length for begin, length in self.skips), default=0)


def score_of(loss: float, losses: Tensor) -> float:
    """How many standard deviations a loss is above the median of others, robustly.

    Example:
        >>> score_of(3.0, torch.tensor([1.0, 1.1, 0.9, 1.0])) > 20
        True
    """
    middle = losses.median()
    spread = max(NORMAL * float((losses - middle).abs().median()), LEAST_SPREAD * abs(float(middle)))
    return (loss - float(middle)) / spread if spread else (math.inf if loss > float(middle) else 0.0)


def spans(skips: list[tuple[int, int]], first: int, stop: int) -> Iterator[Span]:
    """As `Spikes.spans`.

    Example:
        >>> list(spans([(4, 2)], first=3, stop=8))
        [Span(step=3, data=3, count=1), Span(step=4, data=6, count=4)]
    """
    cuts = sorted({first, stop, *(begin for begin, _ in skips if first < begin < stop)})
    for step, end in pairwise(cuts):
        ahead = sum(length for begin, length in skips if begin <= step)
        yield Span(step, step + ahead, end - step)
