"""Iterable datasets: the stream's order is the run's order, and every rank ends at the same step."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_state

from shoal.data.agree import group_device, most_of
from shoal.data.cut import Cut, MicroBatch, StepBatch, WorldLike
from shoal.data.loaders import Board
from shoal.data.prefetch import DataError, at_step
from shoal.data.user import collate_of
from shoal.randomness import seed_random

HAS_TEMPLATE, HAS_DATA = 1, 2


class Slice(NamedTuple):
    """What a rank keeps of each `unit` samples of its stream: `keep` from `offset` on, in start to stop."""

    unit: int
    offset: int
    keep: int
    micro_batch: int
    start: int
    stop: int
    limit: int | None
    """Samples of the stream to read at most."""


class StreamPart(IterableDataset[MicroBatch]):
    """A rank's micro-batches of a stream, cut by reading all of it and keeping its own.

    Of W loader processes, number w collates micro-batches w, w + W, ...; a loader takes from its processes in
    turn, so the order is that of one process. A step that has any sample is whole: what a rank has none of
    is filled with the first samples of the stream, as a filler.

    Args:
        taken: micro-batches that are left out, since processes that are lost had given them.
    """

    def __init__(
        self, stream: Any, part: Slice, cut: Cut, random_key: str, board: Board, taken: int = 0
    ) -> None:
        self._stream, self._part, self._key = stream, part, random_key
        self._board, self._taken = board, taken
        self._global_batch, self._first = cut.global_batch, cut.offset
        self._collate = collate_of(stream)

    def __iter__(self) -> Iterator[MicroBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            # A dataset that sees the loader's processes deals its samples out to them (those of Hugging Face
            # do), and of each share only 1/W would be kept. It is not to see them; torch has no public way to
            # say so.
            worker_state._worker_info = None
        left = islice(self._micro_batches(), self._taken, None)
        for number, (first, samples, counted) in enumerate(left):
            if number % workers == worker:
                yield MicroBatch(self._collated(samples, first), first, counted)

    def _micro_batches(self) -> Iterator[tuple[int, list[Any], int]]:
        """(first, samples, how many count) of each micro-batch of this rank, up to the stream's end."""
        part = self._part
        samples = islice(self._samples(), part.limit)
        spare: list[Any] = []
        for step in range(part.stop):
            own: list[Any] = []
            read = 0
            for read, sample in enumerate(islice(samples, part.unit), start=1):
                if len(spare) < part.micro_batch:
                    spare.append(sample)
                if step >= part.start and part.offset < read <= part.offset + part.keep:
                    own.append(sample)
            if read == 0:
                return
            for at in range(0, part.keep if step >= part.start else 0, part.micro_batch):
                found = own[at : at + part.micro_batch]
                yield step * self._global_batch + self._first + at, found or spare, len(found)

    def _samples(self) -> Iterator[Any]:
        """The stream. Each reader sees the same: its random numbers are a function of the place in it."""
        seed_random(f"{self._key}/open")
        try:
            iterator = iter(self._stream)
        except Exception as error:
            raise DataError(f"the stream cannot be opened: {type(error).__name__}: {error}") from error
        for place in count():
            seed_random(f"{self._key}/{place}")
            self._board.mark(0, place)
            try:
                sample = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"sample {place} of the stream: {type(error).__name__}: {error}") from error
            finally:
                self._board.clear()
            yield sample

    def _collated(self, samples: list[Any], first: int) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise DataError(
                f"{len(samples)} samples of the stream (from number {first} of the run on) cannot be made a micro-batch: "
                f"{type(error).__name__}: {error}"
            ) from error


def stream_steps(parts: Iterator[MicroBatch], cut: Cut, steps: range) -> Generator[StepBatch]:
    """The steps of a stream that every rank reads whole: they end together without a word."""
    for step in steps:
        with at_step(step):
            found = tuple(islice(parts, cut.count))
        if not found:
            return
        yield StepBatch(step, found)


def sharded_steps(
    parts: Iterator[MicroBatch], cut: Cut, world: WorldLike, steps: range, deadline_s: float
) -> Generator[StepBatch]:
    """The steps of streams that each rank has its own of, of any lengths, until none has a sample left.

    Before each step the ranks tell each other in one all-reduce of `world.size` bytes whether they have data.
    A rank without repeats its first micro-batch as a filler; one that never had any is sent another rank's.

    Raises:
        DataError: a rank did not say within `deadline_s` seconds whether it has data. Names the step.
    """
    template: list[Any] = []
    for step in steps:
        with at_step(step):
            found = tuple(islice(parts, cut.count))
        if found and not template:
            template = [copy.deepcopy(found[0].data)]
        states = _tell(
            (HAS_DATA if found else 0) + (HAS_TEMPLATE if template else 0), world, step, deadline_s
        )
        if not any(state & HAS_DATA for state in states):
            return
        if 0 in states:
            template = _send(template, states.index(HAS_DATA + HAS_TEMPLATE))
        yield StepBatch(step, found or _fillers(template, cut, step))


def _fillers(template: list[Any], cut: Cut, step: int) -> tuple[MicroBatch, ...]:
    first = step * cut.global_batch + cut.offset
    return tuple(
        MicroBatch(copy.deepcopy(template[0]), first + at, 0) for at in range(0, cut.local, cut.size)
    )


def _tell(state: int, world: WorldLike, step: int, deadline_s: float) -> list[int]:
    """Every rank's state, by rank."""
    states = [0] * world.size
    states[world.rank] = state
    return most_of(states, world, step, deadline_s, "say whether they have data (data.sharded = true)")


def _send(template: list[Any], source: int) -> list[Any]:
    """One rank's template to all; those that have one keep theirs."""
    box = list(template) or [None]
    dist.broadcast_object_list(box, src=source, device=group_device())
    return template or box
