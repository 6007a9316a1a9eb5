"""Everything a run is made of on one rank, built from its settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.checkpoint.store import model_state, transient_buffers
from shoal.config import Settings
from shoal.data.batches import Datasets, open_dataset
from shoal.imports import load_object
from shoal.models.build import builder
from shoal.observe.metrics import MetricsWriter
from shoal.observe.progress import Progress
from shoal.observe.status import RankStatus
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.resilience.exchange import tell_all
from shoal.resilience.handover import HandOver
from shoal.resilience.snapshot import Snapshots, kept_for, open_snapshots
from shoal.run import Run
from shoal.train.bad import BadOfRun, bad_of, known_to_all
from shoal.train.objective import NextToken, Objective, as_objective
from shoal.train.rates import Rates, rates
from shoal.train.spikes import Spikes
from shoal.train.step import Step
from shoal.world import World, detect_cluster


class Training(NamedTuple):
    """Everything a run is made of."""

    settings: Settings
    plan: Plan
    world: World
    run: Run
    model: nn.Module
    objective: Objective
    step: Step
    datasets: Datasets
    rates: Rates
    progress: Progress
    metrics: MetricsWriter
    status: RankStatus
    snapshots: Snapshots | None
    bad: BadOfRun
    spikes: Spikes | None
    """what tells spikes and remembers skipped data, if the job asks for it"""
    saves: HandOver | None
    transient: tuple[str, ...]
    """buffers that are no part of the model's `state_dict`, of all ranks"""
    empty: bool = False
    """the model's weights are to be loaded: it was given none"""

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint, by name."""
        return _state(self.model, self.step, self.spikes)


def facts_of(training: Training) -> dict[str, Any]:
    """What a checkpoint's manifest says of what wrote it, and of the data so far. Collective."""
    survives = training.settings.data.on_error != "raise"
    left_out = known_to_all(training.bad.train.known, training.world) if survives else {}
    return {
        "job": training.settings.job.model_dump(mode="json"),
        "plan": training.plan.model_dump(),
        "world_size": training.world.size,
        "vocab": training.datasets.vocab,
        **left_out,
        **({"skipped_data": training.spikes.skips} if training.spikes is not None else {}),
        **({"transient": training.transient} if training.transient else {}),
    }


def _state(model: nn.Module, step: Step, spikes: Spikes | None) -> dict[str, torch.Tensor]:
    return model_state(model) | step.state() | (spikes.state() if spikes is not None else {})


def set_up(
    settings: Settings,
    world: World,
    run: Run,
    status: RankStatus,
    *,
    on_phase: Callable[[str, int], None] | None = None,
    saves: HandOver | None = None,
    empty: bool = False,
) -> Training:
    """Data, model, objective and step for this rank.

    Args:
        on_phase: told the phases of each step in place of `status`, as `Step` tells them.
        saves: how a save is handed over; left out, ranks write and wait.
        empty: the model's weights are loaded afterwards: it is given none. The same on all ranks.
    """
    job, plan = settings.job, settings.plan
    if plan is None:
        raise ValueError("settings.plan is not chosen yet")
    datasets = open_dataset(job.data, job.train.seed, Path(settings.run.data) if settings.run.data else None)
    build = builder(job.model, datasets.vocab)
    precision, seed = job.train.precision, job.train.seed
    model = parallelize(build, plan, world, precision=precision, seed=seed, weights=not empty)
    compiled = plan.compiles(world.device.type) is not None
    objective = choose_objective(job.train.objective, datasets.vocab, compiled=compiled)
    cost = rates(job, build, objective, datasets, detect_cluster().device.flops, world.size)
    told = on_phase or status.enter
    step = Step(
        model,
        objective,
        job.optimizer,
        plan,
        world,
        precision=precision,
        total_steps=job.train.steps,
        usual_weight=cost.usual_weight,
        seed=seed,
        scale=(job.train.loss_scale, job.train.loss_scale_growth),
        on_phase=told if saves is None else _with_copies(told, saves),
    )
    spikes = Spikes(job.train) if job.train.spike else None
    progress = Progress(job.train.steps, shown=world.is_main, every=settings.run.log_every)
    metrics = MetricsWriter(run, world.rank, tensorboard=settings.run.tensorboard)
    kept = kept_for(plan, world.rank)
    snapshots = open_snapshots(settings.checkpoint.memory_every, lambda: _state(model, step, spikes), kept)
    return Training(
        settings,
        plan,
        world,
        run,
        model,
        objective,
        step,
        datasets,
        cost,
        progress,
        metrics,
        status,
        snapshots,
        bad_of(run),
        spikes,
        saves,
        transient_of_all(model, plan, world),
        empty,
    )


def transient_of_all(model: nn.Module, plan: Plan, world: World) -> tuple[str, ...]:
    """Names of transient buffers: ranks of a pipeline have different ones. Collective then."""
    names = json.dumps(transient_buffers(model))
    everyone = tell_all(names, world) if plan.pipeline > 1 else [names]
    return tuple(sorted({name for told in everyone for name in json.loads(told)}))


def _with_copies(on_phase: Callable[[str, int], None], saves: HandOver) -> Callable[[str, int], None]:
    """As `on_phase`; what is being copied for a save is not updated before that is done."""

    def told(phase: str, step: int) -> None:
        on_phase(phase, step)
        if phase == "update":
            saves.before_update()

    return told


def choose_objective(spec: str | None, vocab: int | None, *, compiled: bool) -> Objective:
    """The job's own objective, or next-token cross-entropy for data that has a vocabulary.

    Raises:
        ValueError: neither.
    """
    if spec is not None:
        return as_objective(load_object(spec))
    if vocab is None:
        raise ValueError(
            'train.objective is needed for a dataset of your own: "package.module:loss", a function of '
            "(output, target)"
        )
    return NextToken(compiled=compiled)
