"""Reads a map-style dataset in whole micro-batches; what cannot be read is left out or replaced, as the job says."""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from shoal.data.bad import BadSample, Known
from shoal.data.cut import Portion
from shoal.data.loaders import Board
from shoal.data.sampler import substitute
from shoal.data.user import Collate, collate_of, describe_samples
from shoal.frames import user_frame
from shoal.job import OnError
from shoal.randomness import seed_random

MOST_ATTEMPTS = 64
LONGEST = 500  # characters of an error that are told


class Read(NamedTuple):
    """A micro-batch as it was read."""

    data: Any
    samples: int
    """that count"""
    attempts: tuple[int, ...]
    """for each row that was asked for: 0 if it has its own sample, else at which attempt it got another one or was left out"""
    bad: tuple[BadSample, ...]
    """found while reading it; with on_error = "raise" there is one at most, and then no data"""
    hopeless: str = ""
    """why there is no data, if it is for another reason"""
    index: tuple[int, ...] = ()
    """of the samples that it was read from"""
    worker: int | None = None
    """number of the loader process that read it; None: the rank itself"""


class _Row(NamedTuple):
    epoch: int
    index: int
    sample: Any


class _HopelessError(Exception):
    """There is nothing that can stand in."""


class Reader(Dataset[Read]):
    """A dataset read by portions; each sample's random numbers depend on seed, epoch and index alone.

    Args:
        known: bad samples, which are not read again; those that are found are added.
        board: where a loader process says what it is reading.
    """

    def __init__(
        self, dataset: Any, seed: int, on_error: OnError, known: Known, board: Board | None = None
    ) -> None:
        self._dataset, self._seed, self._on_error = dataset, seed, on_error
        self._collate = collate_of(dataset)
        self._board = board or Board(0)
        self.known = known

    def __getitem__(self, index: Portion) -> Read:
        bad: list[BadSample] = []
        try:
            read = self._read(index, bad)
        except _HopelessError as error:
            read = Read(None, 0, (), tuple(bad), str(error))
        worker = get_worker_info()
        return read if worker is None else read._replace(worker=worker.id)

    def _read(self, portion: Portion, bad: list[BadSample]) -> Read:
        asked = portion.samples or len(portion.index)
        keys = list(zip(portion.epoch[:asked].tolist(), portion.index[:asked].tolist(), strict=True))
        while True:
            rows: list[tuple[int, _Row | None]] = []
            for epoch, index in keys:
                rows.append(self._row(epoch, index, bad))
                if bad and self._on_error == "raise":
                    return Read(None, 0, (), (bad[0],))
            kept = [row for _, row in rows if row is not None]
            counted = len(kept) if portion.samples else 0
            if not kept:  # something has to run, so that ranks stay in step
                kept = [self._other(*keys[0], bad)[1]] * len(keys)
            try:
                data = self._collate([row.sample for row in kept])
            except Exception as error:
                self._blame(kept, error, bad)
            else:
                index = tuple(row.index for row in kept)
                return Read(data, counted, tuple(attempts for attempts, _ in rows), tuple(bad), index=index)

    def _row(self, epoch: int, index: int, bad: list[BadSample]) -> tuple[int, _Row | None]:
        """At which attempt a row was had, and the row; None if it is left out."""
        if (row := self._try(epoch, index, bad)) is not None:
            return 0, row
        if self._on_error == "substitute":
            return self._other(epoch, index, bad)
        return 1, None

    def _other(self, epoch: int, index: int, bad: list[BadSample]) -> tuple[int, _Row]:
        for attempt in range(1, MOST_ATTEMPTS + 1):
            other = substitute(self._seed, index, attempt, len(self._dataset))
            if (row := self._try(epoch, other, bad)) is not None:
                return attempt, row
        raise _HopelessError(
            f"{MOST_ATTEMPTS} samples that could stand in for sample {index} (epoch {epoch}) are bad, too"
            + (f"; the last, sample {bad[-1].index}: {bad[-1].error}" if bad else "")
        )

    def _try(self, epoch: int, index: int, bad: list[BadSample]) -> _Row | None:
        if self.known.covers(epoch, index):
            return None
        seed_random(f"sample/{self._seed}/{epoch}/{index}")
        self._board.mark(epoch, index)
        try:
            return _Row(epoch, index, self._dataset[index])
        except Exception as error:
            self._note(epoch, index, error, bad)
            return None
        finally:
            self._board.clear()

    def _blame(self, rows: list[_Row], error: Exception, bad: list[BadSample]) -> None:
        """Find the samples that cannot be collated even alone: whether others fit together is not for one of them to answer."""
        distinct = {row.index: row for row in rows}
        culprits: list[tuple[_Row, Exception]] = []
        for row in distinct.values() if self._on_error != "raise" else []:
            try:
                self._collate([row.sample])
            except Exception as own:
                culprits.append((row, own))
        if not culprits or len(culprits) == len(distinct) > 1:
            raise _HopelessError(
                f"samples {describe_samples(list(distinct))} (epoch {rows[0].epoch}) cannot be made a micro-batch by "
                f"{_name(self._collate)}: {_described(error)}"
            ) from error
        for row, own in culprits:
            self._note(row.epoch, row.index, own, bad)

    def _note(self, epoch: int, index: int, error: Exception, bad: list[BadSample]) -> None:
        self.known.note(epoch, index)
        trace = "".join(traceback.format_exception(error)) if self._on_error == "raise" else ""
        bad.append(BadSample(index, epoch, _described(error), trace))


def _described(error: Exception) -> str:
    """An error in a line, with the place in the user's code, or in the package that it came from."""
    below = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is of this file
    where = user_frame(error.with_traceback(below))
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:LONGEST]}" + (f", at {where}" if where else "")


def _name(function: Collate) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
