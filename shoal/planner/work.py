"""From a job's settings to what is simulated: its model, and batches of the right shapes without data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.data.batches import open_dataset
from shoal.data.cut import MicroBatch, StepBatch
from shoal.data.format import is_prepared, read_index
from shoal.data.text import SourceKind, source_kind
from shoal.data.tokenizer import bytes_tokenizer, hugging_face_tokenizer
from shoal.data.user import collate_of, first_sample, is_iterable
from shoal.models.build import builder
from shoal.plan import Plan
from shoal.planner.fake_device import outside
from shoal.planner.simulate import Work
from shoal.tensors import map_tensors
from shoal.train.rates import Rates, rates_of
from shoal.train.setup import choose_objective

GATHERED = 3  # stages that torch's schedules keep gathered at once
PLAYED = ("gpipe", "1f1b", "interleaved_1f1b")
ENOUGH = 3  # micro-batches: the first, which makes gradients, one that adds to them, and the last, which sends them

Samples = Callable[[int], Any]
"""From a number of samples to a micro-batch of them, without values."""


def work_of(settings: Settings) -> Work:
    """What a job trains, as far as memory is concerned. Text need not be prepared: its shapes are known.

    Of the micro-batches of a step no more are taken than show the peak.

    Raises:
        ValueError: no such model, dataset or objective; or a dataset of the user's own from which no sample can be taken.
    """
    job = settings.job
    vocab = vocab_of(settings)
    samples = _text(settings) if vocab is not None else _own(settings)

    def batch(plan: Plan, rank: int, step: int) -> StepBatch:
        count, size = plan.micro_batches(job.train.global_batch)
        before, share = plan.share(plan.data_rank(rank))
        first, own = before * count * size, share * size
        enough = min(count, _enough(plan, count))
        return StepBatch(
            step, tuple(MicroBatch(samples(own), first + number * own, own) for number in range(enough))
        )

    return Work(
        builder(job.model, vocab),
        lambda compiled: choose_objective(job.train.objective, vocab, compiled=compiled),
        job.optimizer,
        job.train.precision,
        batch,
    )


def _enough(plan: Plan, count: int) -> int:
    """Micro-batches after which nothing new happens; schedules that run all forward first keep them all.

    A pipeline has twice as many in the rhythm of its schedule as fill it, or where each is simulated, as few as fill it.
    """
    if plan.pipeline == 1:
        return ENOUGH
    if plan.schedule in ("gpipe", "looped_bfs"):
        return 1 << 30
    together = plan.pipeline  # micro-batches of a round of an interleaved schedule, as torch has them
    if plan.schedule == "interleaved_1f1b":
        together = count // max(1, count // plan.pipeline)
    return 4 * together if is_played(plan) else 2 * plan.stages


def is_played(plan: Plan) -> bool:
    """Whether micro-batches of a pipeline are alike, so that few are simulated: see `shoal.planner.pipelines`.

    That is so where backwards are whole and in order, parameters are not gathered by and by (as torch's schedules do with more
    than three stages of a rank, too), and attention does not go round a ring, which keeps a few bytes of each micro-batch.
    """
    rings = plan.context > 1 and plan.context_by == "ring"
    in_order = plan.schedule in PLAYED and plan.stages_per_rank <= GATHERED
    return plan.pipeline > 1 and in_order and plan.zero_stage < 3 and not rings


def rates_without_data(settings: Settings, work: Work, cluster: Cluster) -> Rates:
    """What a job's step is worth on a cluster, for its speed and MFU."""
    job = settings.job
    return rates_of(
        job,
        work.build,
        work.objective(False),
        vocab_of(settings),
        lambda: work.batch(Plan(micro_batch=1), 0, 0).micro_batches[0].data,
        cluster.device.flops,
        cluster.num_devices,
    )


def vocab_of(settings: Settings) -> int | None:
    """The vocabulary of a job's text, prepared or not; None for a dataset of the user's own."""
    data, kind = settings.data, source_kind(settings.data.source)
    if kind is SourceKind.USER:
        return None
    folder = settings.run.data if settings.run.data is not None else str(data.source)
    if isinstance(folder, str) and is_prepared(Path(folder)):
        return read_index(Path(folder)).vocab
    if kind is SourceKind.SYNTHETIC or data.tokenizer == "bpe":
        return data.vocab
    return (
        bytes_tokenizer().vocab if data.tokenizer == "bytes" else hugging_face_tokenizer(data.tokenizer).vocab
    )


def _text(settings: Settings) -> Samples:
    data = settings.data
    names = ("tokens", "labels", *(("documents", "positions") if data.isolate_documents else ()))
    return lambda size: {name: torch.zeros(size, data.seq_len, dtype=torch.long) for name in names}


def _own(settings: Settings) -> Samples:
    """Micro-batches shaped like one of the dataset's first sample, repeated."""
    train = open_dataset(settings.data, settings.train.seed, None).train
    try:
        sample = next(iter(train)) if is_iterable(train) else first_sample(train, settings.data.on_error)
    except Exception as error:
        raise ValueError(
            f"data.source = {settings.data.source!r}: its first sample, whose shape a plan needs, cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    collate = collate_of(train)

    def samples(size: int) -> Any:
        with outside():  # the user's function sees its real sample
            real = collate([sample] * size)
        return map_tensors(real, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))

    return samples
