"""How a global batch is cut: which samples a rank reads, in which micro-batches, and what the loop gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.data.sampler import Ids, sample_ids
from shoal.plan import Plan


class MicroBatch(NamedTuple):
    """What a model takes at a time.

    Text: `data` is {"tokens": (B, T), "labels": (B, T)} and with isolated documents "documents" and
    "positions" (B, T), all int64 on the CPU. B never changes: rows past `samples` have no label but -100.
    A dataset of the user's own: what its collate function made of `samples` samples. A filler (samples = 0)
    repeats earlier samples, so that a forward runs and all ranks stay in step; nothing of it counts.
    """

    data: Any
    first: int
    """Index in the run of its first sample: step * global batch + place in the global batch."""
    samples: int
    """Samples that count; 0 for a filler."""
    index: tuple[int, ...] = ()
    """Numbers in the dataset of what it was read from, where samples may have been left out or replaced."""


class StepBatch(NamedTuple):
    """A rank's part of one global batch: at least one micro-batch, as many as on every other rank."""

    step: int
    micro_batches: tuple[MicroBatch, ...]


class WorldLike(Protocol):
    """Who takes part, as far as data is concerned."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Cut(NamedTuple):
    """A rank's place in every global batch: `count` micro-batches of `size` samples from `offset` on.

    Of all ranks' first micro-batches together, of `together` samples, its own begins at `at`; so do their second ones.
    """

    global_batch: int
    offset: int
    count: int
    size: int
    at: int
    together: int

    @property
    def local(self) -> int:
        """Samples of a global batch that the rank reads."""
        return self.count * self.size


class Portion(NamedTuple):
    """What one micro-batch reads: `size` rows, of which the first `samples` count and the others repeat."""

    first: int
    samples: int
    epoch: Ids
    index: Ids


Portions = Callable[[int], tuple[Portion, ...]]
"""A rank's portions of a step, from the step's number."""


def cut_for(plan: Plan, world: WorldLike, global_batch: int) -> Cut:
    """The part of each global batch that belongs to a rank.

    Raises:
        ValueError: the plan is for another world size, or does not divide the global batch.

    Example:
        >>> from types import SimpleNamespace
        >>> cut_for(Plan(replicate=2, micro_batch=2), SimpleNamespace(rank=1, size=2), global_batch=8)
        Cut(global_batch=8, offset=4, count=2, size=2, at=2, together=4)
    """
    if world.size != plan.world_size or not 0 <= world.rank < world.size:
        raise ValueError(
            f"the plan ({plan.describe()}) is for {plan.world_size} ranks; this is rank {world.rank} of "
            f"{world.size}"
        )
    micro_batch = plan.micro_batch or 1
    if global_batch % (plan.all_shares * micro_batch):
        raise ValueError(
            f"train.global_batch = {global_batch} is not {plan.all_shares} ({_of_shares(plan)}) x a whole "
            f"number of micro-batches of {micro_batch} samples (plan.micro_batch): change one of them"
        )
    count, size = plan.micro_batches(global_batch)
    before, share = plan.share(plan.data_rank(world.rank))
    return Cut(
        global_batch, before * count * size, count, share * size, before * size, plan.all_shares * size
    )


def _of_shares(plan: Plan) -> str:
    return "the sum of plan.shares" if plan.shares else "replicate x shard"


def train_portions(cut: Cut, seed: int, n: int, shuffle: bool) -> Portions:
    """Portions of a dataset of n samples that is read again and again, each epoch in its own order."""

    def portions(step: int) -> tuple[Portion, ...]:
        first = step * cut.global_batch + cut.offset
        ids = sample_ids(seed, first, cut.local, n, shuffle)
        return tuple(
            Portion(first + at, cut.size, ids.epoch[at : at + cut.size], ids.index[at : at + cut.size])
            for at in range(0, cut.local, cut.size)
        )

    return portions


def eval_portions(cut: Cut, samples: int, fixed_count: bool) -> Portions:
    """Portions that hold each of the first `samples` indices once, in index order.

    Ranks take micro-batches in turn. The last step has only as many as are needed, the same number on every
    rank, unless `fixed_count` (a pipeline schedule is built for one number).
    """

    def portions(step: int) -> tuple[Portion, ...]:
        start = step * cut.global_batch
        needed = -(-min(samples - start, cut.global_batch) // cut.together)
        return tuple(
            _eval_portion(start + number * cut.together + cut.at, cut.size, samples)
            for number in range(cut.count if fixed_count else needed)
        )

    return portions


def _eval_portion(first: int, size: int, samples: int) -> Portion:
    index = np.arange(first, first + size, dtype=np.int64)
    counted = max(0, min(size, samples - first))
    return Portion(first, counted, np.zeros(size, dtype=np.int64), index % samples)
