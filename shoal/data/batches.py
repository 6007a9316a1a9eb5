"""Batches: opens what a job names and deals each global batch out to the ranks, always in one order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

from shoal.data.bad import BadSamples
from shoal.data.cut import (
    Cut,
    MicroBatch,
    Portion,
    Portions,
    StepBatch,
    WorldLike,
    cut_for,
    eval_portions,
    train_portions,
)
from shoal.data.format import TOKENIZER_FILE, PreparedIndex, read_index
from shoal.data.loaders import Casualty, loader_of, steadily
from shoal.data.prefetch import DataError, read_ahead
from shoal.data.sampler import sample_ids
from shoal.data.stream import Slice, StreamPart, sharded_steps, stream_steps
from shoal.data.supply import Supply, sample_deadline, told
from shoal.data.synthetic import EVAL_SAMPLES, TRAIN_SAMPLES, SyntheticDataset
from shoal.data.text import SourceKind, source_kind, source_name
from shoal.data.tokens import NO_LABEL, TokenDataset
from shoal.data.user import (
    describe_samples,
    is_dataset,
    is_iterable,
    loaders_for,
    open_user_datasets,
)
from shoal.job import Data, Job
from shoal.plan import Plan

__all__ = [
    "BadSamples",
    "DataError",
    "Datasets",
    "MicroBatch",
    "StepBatch",
    "WorldLike",
    "batches",
    "eval_batches",
    "numbers_of",
    "open_dataset",
]

DEADLINE_S = 600.0
TextDataset = TokenDataset | SyntheticDataset

logger = logging.getLogger(__name__)


class Datasets(NamedTuple):
    """What a job reads: to train, to evaluate (or None); of text also vocabulary size and tokenizer.json."""

    train: Any
    eval: Any | None
    vocab: int | None
    tokenizer: Path | None


def open_dataset(data: Data, seed: int, folder: Path | None) -> Datasets:
    """Open what `data.source` names. `folder` is where `prepare` put a text source, else unused.

    Raises:
        ValueError: text that is not prepared, or is from other settings; a damaged folder; no such dataset.

    Example:
        >>> open_dataset(Data(source="synthetic", vocab=512), seed=0, folder=None).vocab
        512
    """
    kind = source_kind(data.source)
    if kind is SourceKind.SYNTHETIC:
        return _open_synthetic(data, seed)
    if kind is SourceKind.USER:
        train, held_out = open_user_datasets(source_name(data.source), data.options)
        return Datasets(train, held_out, None, None)
    if kind is SourceKind.PREPARED:
        folder = Path(source_name(data.source))
        return _open_tokens(data, folder, read_index(folder))
    if folder is None:
        raise ValueError(f"data.source {source_name(data.source)!r} is text: prepare it, and give the folder")
    index = read_index(folder)
    _check_origin(data, seed, folder, index)
    return _open_tokens(data, folder, index)


def batches(
    dataset: Any,
    job: Job,
    plan: Plan,
    world: WorldLike,
    *,
    start: int = 0,
    stop: int | None = None,
    bad: BadSamples | None = None,
    deadline_s: float = DEADLINE_S,
    ahead: int = 0,
) -> Generator[StepBatch]:
    """This rank's part of the global batches of steps start to stop (default: train.steps).

    The samples of a step depend on the seed and the step alone: not on the plan, the world, the loader
    processes, or where the run was resumed. A map-style dataset is read again and again, an iterable ends.
    Text is read ahead in a thread, datasets of the user's own by data.workers loader processes (with 0, in
    the calling thread, where no deadline can be kept; left out: see `loaders_for`). Loader processes that die or
    hang are replaced, and what they were to read is read again.

    Args:
        bad: what is known of bad samples, which grows; left out: nothing is, and what is found is logged.
        ahead: by so many steps the data is ahead of the run, whose steps are told where samples are bad.

    Raises:
        ValueError: the plan does not fit the world or global batch, or the dataset is none or empty.
        DataError: a sample cannot be read (see `data.on_error`), or nothing came for `deadline_s` seconds. Names
            step and samples.

    Example:
        >>> from types import SimpleNamespace
        >>> job, world = Job(), SimpleNamespace(rank=0, size=1)  # global_batch = 32
        >>> for batch in batches([10, 20, 30], job, Plan(micro_batch=16), world, stop=1):
        ...     for micro_batch in batch.micro_batches:
        ...         micro_batch.first, len(micro_batch.data)
        (0, 16)
        (16, 16)
    """
    steps = range(start, job.train.steps if stop is None else stop)
    cut = cut_for(plan, world, job.train.global_batch)
    if not isinstance(dataset, TextDataset) and is_iterable(dataset):
        _warn_of_cost(job.data, world)
        return _stream(dataset, job, plan, cut, world, steps, None, bad or BadSamples(), deadline_s)
    if job.data.sharded:
        raise ValueError(
            "data.sharded = true says that an iterable dataset gives each rank its own part, but this dataset has an index "
            f"({type(dataset).__name__}); leave data.sharded out"
        )
    portions = train_portions(cut, job.train.seed, _length(dataset), job.data.shuffle)
    return _indexed(dataset, job, plan, portions, steps, world, bad, deadline_s, ahead)


def numbers_of(dataset: Any, job: Job) -> Callable[[MicroBatch], list[int]]:
    """From a micro-batch to the numbers of its samples: in the dataset, or where it has none, in the run."""
    if not isinstance(dataset, TextDataset) and is_iterable(dataset):
        return lambda micro: list(range(micro.first, micro.first + micro.samples))
    seed, n, shuffle = job.train.seed, _length(dataset), job.data.shuffle

    def numbers(micro: MicroBatch) -> list[int]:
        return list(micro.index) or sample_ids(seed, micro.first, micro.samples, n, shuffle).index.tolist()

    return numbers


def eval_batches(
    dataset: Any,
    job: Job,
    plan: Plan,
    world: WorldLike,
    *,
    bad: BadSamples | None = None,
    deadline_s: float = DEADLINE_S,
) -> Generator[StepBatch]:
    """This rank's part of the held-out samples, each counted once: all, or the first train.eval_samples.

    All ranks get the same number of micro-batches; those past the end are fillers. Raises as `batches` does.
    """
    cut = cut_for(plan, world, job.train.global_batch)
    limit = job.train.eval_samples
    if not isinstance(dataset, TextDataset) and is_iterable(dataset):
        steps = range(1 << 62) if limit is None else range(-(-limit // cut.global_batch))
        return _stream(dataset, job, plan, cut, world, steps, limit, bad or BadSamples(), deadline_s)
    samples = _length(dataset) if limit is None else min(limit, _length(dataset))
    portions = eval_portions(cut, samples, fixed_count=plan.pipeline > 1)
    steps = range(-(-samples // cut.global_batch))
    return _indexed(dataset, job, plan, portions, steps, world, bad, deadline_s)


def _open_synthetic(data: Data, seed: int) -> Datasets:
    def part(samples: int, first: int) -> SyntheticDataset:
        return SyntheticDataset(
            data.vocab,
            data.seq_len,
            seed,
            samples=samples,
            first=first,
            isolate_documents=data.isolate_documents,
        )

    held_out = part(EVAL_SAMPLES, TRAIN_SAMPLES) if data.eval_fraction else None
    return Datasets(part(TRAIN_SAMPLES, 0), held_out, data.vocab, None)


def _open_tokens(data: Data, folder: Path, index: PreparedIndex) -> Datasets:
    train = TokenDataset(folder, "train", data.seq_len, data.isolate_documents)
    has_eval = "eval" in index.splits and index.splits["eval"].tokens > 1
    held_out = TokenDataset(folder, "eval", data.seq_len, data.isolate_documents) if has_eval else None
    return Datasets(train, held_out, index.vocab, folder / TOKENIZER_FILE)


def _check_origin(data: Data, seed: int, folder: Path, index: PreparedIndex) -> None:
    expected = (source_name(data.source), data.tokenizer, data.eval_fraction, seed)
    found = (index.source, index.tokenizer, index.eval_fraction, index.seed)
    names = ("source", "tokenizer", "eval_fraction", "seed")
    other = [f"{n} {f!r}, now {e!r}" for n, f, e in zip(names, found, expected, strict=True) if f != e]
    if other:
        raise ValueError(f"{folder} was prepared with {'; '.join(other)}. Prepare another folder.")


def _length(dataset: Any) -> int:
    if not isinstance(dataset, TextDataset) and not is_dataset(dataset):
        raise ValueError(
            f"{type(dataset).__name__} is no dataset: expected __getitem__ and __len__, or an IterableDataset"
        )
    length = len(dataset)
    if length == 0:
        raise ValueError(f"the dataset ({type(dataset).__name__}) is empty; at least one sample is needed")
    return length


def _indexed(
    dataset: Any,
    job: Job,
    plan: Plan,
    portions: Portions,
    steps: range,
    world: WorldLike,
    bad: BadSamples | None,
    deadline_s: float,
    ahead: int = 0,
) -> Generator[StepBatch]:
    if isinstance(dataset, TextDataset):
        _require_raise(job.data, "of text, which is checked when it is opened")
        return read_ahead(
            lambda step: _read_text(dataset, portions(step), step), steps, deadline_s=deadline_s
        )
    if plan.pipeline > 1 and job.data.on_error == "skip":
        raise ValueError(
            'data.on_error = "skip" makes micro-batches of fewer samples, which the stages of plan.pipeline = '
            f'{plan.pipeline} cannot pass on; "substitute" keeps their size'
        )
    supply = Supply(
        dataset,
        job,
        portions,
        world,
        workers=loaders_for(job.data.workers, getattr(world, "device", None)),
        shared=world.size > plan.data_degree,
        bad=bad or BadSamples(),
        deadline_s=deadline_s,
        ahead=ahead,
    )
    return supply.steps(steps)


def _require_raise(data: Data, what: str) -> None:
    if data.on_error != "raise":
        raise ValueError(
            f'data.on_error = "{data.on_error}" is for datasets of your own with __getitem__ and __len__; this one is {what}. '
            "Leave data.on_error out"
        )


def _read_text(dataset: TextDataset, portions: tuple[Portion, ...], step: int) -> StepBatch:
    found = []
    for portion in portions:
        try:
            data = dataset.fetch(portion.index)
        except Exception as error:
            raise DataError(
                f"step {step}: reading samples {describe_samples(portion.index.tolist())} failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        data["labels"][portion.samples :] = NO_LABEL
        found.append(MicroBatch(data, portion.first, portion.samples))
    return StepBatch(step, tuple(found))


def _stream(
    dataset: Any,
    job: Job,
    plan: Plan,
    cut: Cut,
    world: WorldLike,
    steps: range,
    limit: int | None,
    bad: BadSamples,
    deadline_s: float,
) -> Generator[StepBatch]:
    data, key = job.data, f"stream/{job.train.seed}"
    _require_raise(data, "a stream, which cannot be read on after an error")
    workers = data.workers or 0  # each reads all of the stream: so none of its own accord
    part = Slice(cut.global_batch, cut.offset, cut.local, cut.size, steps.start, steps.stop, limit)
    if data.sharded:
        _check_sharded(plan, world)
        rank, together = plan.data_rank(world.rank), plan.all_shares
        before, own = plan.share(rank)
        share = None if limit is None else limit * before // -together - limit * (before + own) // -together
        key = f"{key}/{rank}"
        part = part._replace(unit=cut.local, offset=0, limit=share)

    def tell(lost: Casualty, number: int) -> None:
        bad.tell("loader restarted", told(lost, steps.start + number // cut.count, world.rank))

    def blame(lost: Casualty) -> None:
        place = lost.sample[1] if lost.sample else 0
        raise DataError(
            f"sample {place} of the stream cannot be read by rank {world.rank}: {lost.accusation()}"
        )

    parts = steadily(
        lambda number, board: loader_of(
            StreamPart(dataset, part, cut, key, board, taken=number), board, workers=workers
        ),
        workers=workers,
        deadline_s=sample_deadline(data, deadline_s),
        tell=tell,
        blame=blame,
    )
    if data.sharded:
        return sharded_steps(parts, cut, world, steps, deadline_s)
    return stream_steps(parts, cut, steps)


def _check_sharded(plan: Plan, world: WorldLike) -> None:
    if world.size > plan.data_degree:
        raise ValueError(
            f"data.sharded = true with the plan {plan.describe()}: {world.size // plan.data_degree} ranks "
            "share each sample, but a dataset that gives each rank its own part gives them different ones. "
            "Leave data.sharded out, or use replicate and shard alone."
        )


def _warn_of_cost(data: Data, world: WorldLike) -> None:
    workers = max(1, data.workers or 0)
    if not data.sharded and world.rank == 0 and world.size * workers > 1:
        logger.warning(
            "An iterable dataset has one order and no index, so each of %d ranks x %d loader processes reads "
            "all of it and keeps its own part: %d times the reading of one. A map-style dataset is read "
            "once; a dataset "
            "that gives each rank its own part says so with data.sharded = true.",
            world.size,
            workers,
            world.size * workers,
        )
