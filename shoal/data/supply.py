"""A rank's steps of a map-style dataset of the user's own, though samples are bad, and loader processes die or hang."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from shoal.data.agree import most_of
from shoal.data.bad import EVERY_EPOCH, BadSample, BadSamples, Known, Share
from shoal.data.cut import MicroBatch, Portion, Portions, StepBatch, WorldLike
from shoal.data.loaders import Board, Casualty, loader_of, steadily
from shoal.data.prefetch import DataError, at_step
from shoal.data.reader import Read, Reader
from shoal.data.sampler import substitute
from shoal.job import Data, Job
from shoal.randomness import random_state_kept

SAMPLE_S = 60.0


def sample_deadline(data: Data, deadline_s: float) -> float:
    """Seconds that a loader process may be at one sample.

    Raises:
        ValueError: it is no less than the deadline after which a whole rank counts as hung.
    """
    if data.deadline_s is None:
        return min(SAMPLE_S, deadline_s / 4)  # so that three processes can be lost before the rank is
    if data.deadline_s >= deadline_s:
        raise ValueError(
            f"data.deadline_s = {data.deadline_s:g} is not less than run.deadline_s = {deadline_s:g}, after which the whole "
            "rank counts as hung; make it a quarter of that, or less"
        )
    return data.deadline_s


class Supply:
    """What a rank reads of a map-style dataset, step by step.

    Args:
        workers: loader processes; 0: read in the calling thread.
        shared: other ranks read the same samples, and have to take the same ones for bad.
        bad: what is known of bad samples, and who is told of them.
        ahead: by so many steps the data is ahead of the run, by whose steps everything is told.
    """

    def __init__(
        self,
        dataset: Any,
        job: Job,
        portions: Portions,
        world: WorldLike,
        *,
        workers: int,
        shared: bool,
        bad: BadSamples,
        deadline_s: float,
        ahead: int = 0,
    ) -> None:
        self._dataset, self._job, self._portions, self._world = dataset, job, portions, world
        self._workers, self._bad, self._deadline_s = workers, bad, deadline_s
        self._sample_s = sample_deadline(job.data, deadline_s)
        self._agrees = shared and job.data.on_error != "raise"
        self._share = Share(job.data.most_bad)
        self._step = self._taken = 0
        self._ahead = ahead

    def steps(self, steps: range) -> Generator[StepBatch]:
        """The steps, in order.

        Raises:
            DataError: of a sample that ends the run, too many bad samples, or loader processes that are lost again and again.
        """
        reads = self._read_all(steps)
        for self._step in steps:
            portions = self._portions(self._step)
            with at_step(self._step - self._ahead):
                found: list[Read] = []
                for self._taken in range(len(portions)):
                    found.append(self._judged(next(reads)))
                if self._agrees:
                    found = self._agreed(portions, found)
                for portion, read in zip(portions, found, strict=True):
                    self._share.count(*_tally(portion, read))
            yield StepBatch(
                self._step,
                tuple(
                    MicroBatch(read.data, portion.first, read.samples, read.index)
                    for portion, read in zip(portions, found, strict=True)
                ),
            )

    def _read_all(self, steps: range) -> Iterator[Read]:
        if self._workers:
            return steadily(
                lambda _, board: self._loader(steps, board),
                workers=self._workers,
                deadline_s=self._sample_s,
                tell=lambda lost, _: self._bad.tell(
                    "loader restarted", told(lost, self._step - self._ahead, self._world.rank)
                ),
                blame=self._blame,
            )
        reader = self._reader(None)
        return (_in_peace(reader, portion) for step in steps for portion in self._portions(step))

    def _reader(self, board: Board | None) -> Reader:
        data = self._job.data
        return Reader(self._dataset, self._job.train.seed, data.on_error, Known(self._bad.known), board)

    def _loader(self, steps: range, board: Board) -> DataLoader[Any]:
        """Loader processes that begin at the micro-batch that is read next."""
        left = (portion for step in range(self._step, steps.stop) for portion in self._portions(step))
        keys = islice(left, self._taken, None)
        return loader_of(self._reader(board), board, workers=self._workers, keys=keys)

    def _judged(self, read: Read) -> Read:
        """A micro-batch that can be used."""
        rank = self._world.rank
        who = f"rank {rank}" if read.worker is None else f"loader process {read.worker} of rank {rank}"
        if read.bad and self._job.data.on_error == "raise":
            bad = read.bad[0]
            error = _end_of_run(bad.index, bad.epoch, who, bad.error)
            error.add_note(f"in the dataset:\n{bad.trace}")
            raise error
        for bad in read.bad:
            self._bad.add(bad, step=self._step - self._ahead, rank=rank)
        if read.hopeless:
            raise DataError(f"{who}: {read.hopeless}")
        return read

    def _blame(self, lost: Casualty) -> None:
        """A sample that loader processes are lost at is bad in every epoch."""
        epoch, index = lost.sample or (0, 0)
        if self._job.data.on_error == "raise":
            raise _end_of_run(index, epoch, f"rank {self._world.rank}", lost.accusation())
        bad = BadSample(index, EVERY_EPOCH, lost.accusation())
        self._bad.add(bad, step=self._step - self._ahead, rank=self._world.rank)

    def _agreed(self, portions: tuple[Portion, ...], found: list[Read]) -> list[Read]:
        """What all ranks can use: a sample that is bad on one of those that read it is so on all of them.

        One all-reduce of a byte a sample of the global batch: at which attempt each row was had.
        """
        start = self._step * self._job.train.global_batch
        mine = [0] * self._job.train.global_batch
        for portion, read in zip(portions, found, strict=True):
            for row, attempts in enumerate(read.attempts):
                mine[portion.first - start + row] = attempts
        most = most_of(mine, self._world, self._step, self._deadline_s, "say which samples are bad")
        return [
            self._again(portion, read, most[portion.first - start :])
            for portion, read in zip(portions, found, strict=True)
        ]

    def _again(self, portion: Portion, read: Read, most: list[int]) -> Read:
        """A micro-batch read again without what is bad on another rank, if anything is."""
        wanted = tuple(most[: len(read.attempts)])
        if read.attempts == wanted:
            return read
        reader, seed = self._reader(None), self._job.train.seed
        for row, attempts in enumerate(wanted):
            epoch, index = int(portion.epoch[row]), int(portion.index[row])
            for attempt in range(attempts):
                other = substitute(seed, index, attempt, len(self._dataset)) if attempt else index
                reader.known.note(epoch, other)
                self._bad.known.note(epoch, other)
        again = self._judged(_in_peace(reader, portion))
        if again.attempts != wanted:
            raise DataError(
                f"rank {self._world.rank} cannot read the samples that another rank can, at a second attempt either; they are "
                "the same on both. Is the storage at fault?"
            )
        return again


def told(lost: Casualty, step: int, rank: int) -> dict[str, Any]:
    """A lost loader process, for those who are told of it."""
    epoch, index = lost.sample or (None, None)
    return {"step": step, "rank": rank, "pid": lost.pid, "reason": lost.how, "index": index, "epoch": epoch}


def _end_of_run(index: int, epoch: int, who: str, why: str) -> DataError:
    return DataError(
        f"sample {index} (epoch {epoch}) cannot be read by {who}: {why}. Repair it, or go on without it: "
        'data.on_error = "skip" leaves such samples out, "substitute" reads others in their place'
    )


def _tally(portion: Portion, read: Read) -> tuple[int, int]:
    """Samples that were asked for, and those of them that are bad; of a filler none."""
    return (len(read.attempts), sum(map(bool, read.attempts))) if portion.samples else (0, 0)


def _in_peace(reader: Reader, portion: Portion) -> Read:
    """Read in the calling thread, whose random numbers stay as they are."""
    with random_state_kept():
        return reader[portion]
