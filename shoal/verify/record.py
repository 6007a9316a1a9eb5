"""What a few steps of a job computed under a plan: on each rank, gathered, and written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Settings
from shoal.data.batches import batches, open_dataset
from shoal.data.cut import StepBatch
from shoal.data.tokens import NO_LABEL
from shoal.launch.worker import StopFlag
from shoal.models.build import builder
from shoal.observe.status import RankStatus
from shoal.parallel import offload
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import seed_of, weights_hash, whole_tensor
from shoal.parallel.replicate import core
from shoal.parallel.shard import reshard
from shoal.run import write_whole
from shoal.train import streamed
from shoal.train.setup import choose_objective
from shoal.train.step import Step
from shoal.world import World

TASKS = "tasks.json"


class Record(NamedTuple):
    """Whole numbers of a run: losses, gradient norms and gradients (of the mean loss) by step, and the weights at its end."""

    initial: str
    """hash of the weights that it began with"""
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    """of all layers at the end, such as running statistics"""


class PlanRefusedError(ValueError):
    """The model's structure does not allow the plan, as all ranks find alike."""


def record(settings: Settings, world: World) -> Record:
    """Train `train.steps` steps and keep everything. Collective; all ranks return the same.

    Raises:
        PlanRefusedError: on all ranks.
    """
    job, plan = settings.job, settings.plan
    if plan is None:
        raise ValueError("a record needs a plan")
    datasets = open_dataset(job.data, job.train.seed, None)
    build = builder(job.model, datasets.vocab)
    try:
        with _small_pieces():
            model = parallelize(build, plan, world, precision=job.train.precision, seed=job.train.seed)
    except ValueError as error:
        raise PlanRefusedError(str(error)) from error
    initial = weights_hash(model)
    gradients: list[dict[str, Tensor]] = []

    def keep(found: dict[str, Tensor], divide_by: Tensor) -> None:
        gradients.append(_of_all_ranks({name: _whole(x) / divide_by for name, x in found.items()}))

    with _small_pieces():
        step = Step(
            model,
            choose_objective(job.train.objective, datasets.vocab, compiled=False),
            job.optimizer,
            plan,
            world,
            precision=job.train.precision,
            total_steps=job.train.steps,
            seed=job.train.seed,
            on_gradients=keep,
        )
    losses, norms = [], []
    for batch in batches(datasets.train, job, plan, world):
        result = step(_ragged(batch))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    reshard(model)
    weights = _of_all_ranks({name: _whole(p.detach()) for name, p in core(model).named_parameters()})
    buffers = _of_all_ranks({name: b.double().cpu() for name, b in core(model).named_buffers()})
    return Record(initial, losses, norms, gradients, weights, buffers)


@contextmanager
def _small_pieces() -> Generator[None]:
    """Offload takes a small copy's tensors in several pieces, as it takes large ones."""
    before = offload.KEPT_BYTES, streamed.BUCKET_BYTES
    offload.KEPT_BYTES, streamed.BUCKET_BYTES = 1 << 9, 1 << 14
    try:
        yield
    finally:
        offload.KEPT_BYTES, streamed.BUCKET_BYTES = before


def record_tasks(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Record every settings file that the run directory lists and that is not there yet, one after the other: what `launch` runs
    on each rank.
    """
    folder = Path(settings.run.dir)
    texts: list[str] = json.loads((folder / TASKS).read_text())
    left = [number for number in range(len(texts)) if not is_recorded(folder, number)]
    world.barrier("what is left to record")  # before rank 0 adds to it
    for number in left:
        text = texts[number]
        status.enter("verify", number)
        if world.broadcast_text(("stop" if stop.requested else "") if world.is_main else None):
            return  # asked to, on all ranks before the same task
        try:
            found = record(Settings.from_toml(text), world)
        except PlanRefusedError as error:
            if world.is_main:
                write_whole(folder / f"{number}.refused", str(error))
            continue
        if world.is_main:
            whole = folder / f"{number}.part"
            torch.save(found._asdict(), whole)
            whole.rename(folder / f"{number}.pt")


def is_recorded(folder: Path, number: int) -> bool:
    """Whether it is known what comes of a task: a record, a refusal or a failure."""
    return any((folder / f"{number}.{end}").exists() for end in ("pt", "refused", "failed"))


def read_record(folder: Path, number: int) -> Record:
    """What rank 0 wrote of a task."""
    return Record(**torch.load(folder / f"{number}.pt", weights_only=True))


def _ragged(batch: StepBatch) -> StepBatch:
    """Text whose samples keep different numbers of labels, so that no two ranks weigh the same."""

    def cut(data: Any, first: int) -> Any:
        if not isinstance(data, dict) or "labels" not in data:
            return data
        labels = data["labels"].clone()
        for row in range(len(labels)):
            labels[row, seed_of("labels", first + row) % labels.shape[1] + 1 :] = NO_LABEL
        return {**data, "labels": labels}

    return batch._replace(
        micro_batches=tuple(
            micro._replace(data=cut(micro.data, micro.first)) for micro in batch.micro_batches
        )
    )


def _whole(x: Tensor) -> Tensor:
    return whole_tensor(x).double().cpu()


def _of_all_ranks(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks: those of a pipeline have different ones."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(mine))
    if all(other == names[0] for other in names):
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: tensor for known in everyone for name, tensor in known.items()}
