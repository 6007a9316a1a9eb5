"""Samples that cannot be used: told once, counted, and remembered by a run that goes on.

Whether a sample is bad depends on its index and epoch, as its random numbers do: one whose augmentation fails in an epoch
is read again in the next. One that ends the processes that read it is bad in every epoch, so that it ends no more of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.data.prefetch import DataError

EVERY_EPOCH = -1
MOST_BAD = 0.01  # of the samples read, unless the job says otherwise
FEW = 8  # bad samples that a rank may meet whatever their share: of the first few it says little

Tell = Callable[[str, dict[str, Any]], None]
"""told the kind of what happened, and its details"""

logger = logging.getLogger(__name__)


class BadSample(NamedTuple):
    """A sample that cannot be used, in an epoch or in every one; `error` is one line, `trace` its traceback."""

    index: int
    epoch: int
    error: str
    trace: str = ""


class Known(dict[int, int]):
    """Bad samples: of each index the newest epoch in which it was bad, or EVERY_EPOCH."""

    def covers(self, epoch: int, index: int) -> bool:
        return self.get(index) in (epoch, EVERY_EPOCH)

    def note(self, epoch: int, index: int) -> None:
        if self.get(index) != EVERY_EPOCH:
            self[index] = epoch if epoch == EVERY_EPOCH else max(epoch, self.get(index, 0))


class BadSamples:
    """What a rank knows of the bad samples of a dataset. Outlives the batches that found them.

    Args:
        tell: told of each bad sample, once, and of each loader process that was replaced; left out: logged.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self.known = Known()
        self.tell = tell or _log

    def add(self, bad: BadSample, **where: Any) -> None:
        """Remember a sample, and tell of it unless an earlier epoch had it."""
        is_new = bad.index not in self.known
        self.known.note(bad.epoch, bad.index)
        if is_new:
            epoch = None if bad.epoch == EVERY_EPOCH else bad.epoch
            self.tell("bad sample", {**where, "index": bad.index, "epoch": epoch, "error": bad.error})


class Share:
    """How many of the samples that a rank reads are bad."""

    def __init__(self, most: float | None) -> None:
        self._most = MOST_BAD if most is None else most
        self._read = self._bad = 0

    def count(self, read: int, bad: int) -> None:
        """Raises DataError when too many are, and the run would train on something else than was meant."""
        self._read += read
        self._bad += bad
        if self._bad > FEW and self._bad > self._most * self._read:
            raise DataError(
                f"{self._bad} of the {self._read:,} samples that this rank has read are bad, more than data.most_bad = "
                f'{self._most:g} allows; events.jsonl has them as "bad sample". Repair the dataset, or raise data.most_bad'
            )


def _log(kind: str, details: dict[str, Any]) -> None:
    logger.warning("%s: %s", kind, ", ".join(f"{key} {value}" for key, value in details.items()))
