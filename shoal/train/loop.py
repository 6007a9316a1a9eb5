"""`train`: a run from its settings to its last checkpoint, on one rank of a world."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.store import load, model_state, newest, save
from shoal.config import Settings
from shoal.data.batches import batches, eval_batches, open_dataset
from shoal.data.cut import StepBatch
from shoal.imports import load_object
from shoal.models.build import builder
from shoal.observe.metrics import GIB, Metrics, MetricsWriter, forget_after, memory_bytes
from shoal.observe.progress import Progress
from shoal.observe.status import RankStatus
from shoal.parallel.apply import parallelize, synchronise_buffers
from shoal.run import Run, write_whole
from shoal.train.evaluate import Evaluation, evaluate
from shoal.train.objective import NextToken, Objective, as_objective
from shoal.train.rates import Rates, rates
from shoal.train.step import Step, StepResult
from shoal.world import World, detect_cluster

MOST_SKIPPED = 50  # steps in a row without an update, after which a run is lost


class StopFlag(Protocol):
    """Set by a signal; asks for an orderly end."""

    @property
    def requested(self) -> bool: ...


class Training(NamedTuple):
    """Everything a run is made of."""

    settings: Settings
    world: World
    run: Run
    model: nn.Module
    objective: Objective
    step: Step
    datasets: Any
    rates: Rates
    progress: Progress
    metrics: MetricsWriter
    status: RankStatus


def train(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Train until the job's last step, or until some rank is asked to stop; then save. Collective.

    `settings.plan` is set, and the data is prepared or is made by import path.
    """
    run = Run(Path(settings.run.dir))
    world.agree("the job", settings.to_toml())
    status.enter("setup", 0)
    training = set_up(settings, world, run, status)
    done = resume(training)
    with training.progress:
        introduce(training, done)
        done, stopped = train_steps(training, done, stop)
        if not stopped:
            _evaluate(training, done)
        if stopped or settings.checkpoint.last:
            _save(training, done)
        conclude(training, done, stopped)
    training.metrics.close()
    status.finish(done)


def train_steps(training: Training, done: int, stop: StopFlag) -> tuple[int, bool]:
    """Take steps from `done` on; returns how many are done and whether a rank asked to stop.

    On a GPU, numbers of a step are read while the next one runs, so that the device is never waited for.
    """
    status, steps = training.status, training.settings.train.steps
    asynchronous = training.world.device.type == "cuda"
    unread: list[StepResult] = []
    clock, stopped = Clock(), False
    status.enter("data", done)
    for batch in _batches(training, done, steps):
        unread.append(training.step(batch, stop=stop.requested))
        done = batch.step + 1
        due_eval, due_save = (_is_due(every, done, steps) for every in _periods(training.settings))
        stopped = _report(training, unread, clock, leave=int(asynchronous and not due_eval and not due_save))
        if stopped:
            break
        if due_eval:
            _evaluate(training, done)
        if due_save:
            _save(training, done)
        if due_eval or due_save:
            clock.restart()
        status.enter("data", done)
    stopped = _report(training, unread, clock, leave=0) or stopped
    return done, stopped and done < steps


class Clock:
    """Seconds between the ends of steps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.skipped = 0

    def lap(self) -> float:
        now = time.perf_counter()
        self._last, seconds = now, now - self._last
        return seconds

    def restart(self) -> None:
        """Do not count what happened since the last lap."""
        self._last = time.perf_counter()


def _periods(settings: Settings) -> tuple[int, int]:
    return settings.train.eval_every, settings.checkpoint.every


def _is_due(every: int, done: int, steps: int) -> bool:
    return every > 0 and done % every == 0 and done < steps


def _batches(training: Training, done: int, steps: int) -> Iterator[StepBatch]:
    settings = training.settings
    assert settings.plan is not None
    return batches(
        training.datasets.train,
        settings.job,
        settings.plan,
        training.world,
        start=done,
        stop=steps,
        deadline_s=settings.run.deadline_s,
    )


def set_up(settings: Settings, world: World, run: Run, status: RankStatus) -> Training:
    """Data, model, objective and step for this rank."""
    job, plan = settings.job, settings.plan
    if plan is None:
        raise ValueError("settings.plan is not chosen yet")
    datasets = open_dataset(job.data, job.train.seed, Path(settings.run.data) if settings.run.data else None)
    build = builder(job.model, datasets.vocab)
    model = parallelize(build, plan, world, precision=job.train.precision, seed=job.train.seed)
    compiled = plan.compile if plan.compile is not None else world.device.type == "cuda"
    objective = choose_objective(job.train.objective, datasets.vocab, compiled=compiled)
    cost = rates(job, build, objective, datasets, detect_cluster().device.flops, world.size)
    step = Step(
        model,
        objective,
        job.optimizer,
        plan,
        world,
        precision=job.train.precision,
        total_steps=job.train.steps,
        usual_weight=cost.usual_weight,
        seed=job.train.seed,
        scale=(job.train.loss_scale, job.train.loss_scale_growth),
        on_phase=status.enter,
    )
    progress = Progress(job.train.steps, shown=world.is_main, every=settings.run.log_every)
    metrics = MetricsWriter(run, world.rank, tensorboard=settings.run.tensorboard)
    return Training(settings, world, run, model, objective, step, datasets, cost, progress, metrics, status)


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


def state_of(training: Training) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return model_state(training.model) | training.step.state()


def resume(training: Training) -> int:
    """Load the newest complete checkpoint, if there is one; returns the steps that are done."""
    settings, world, run = training.settings, training.world, training.run
    done = 0
    if settings.run.resume:
        found, refused = newest(run.checkpoints, world)
        for entry in refused if world.is_main else []:
            run.event("checkpoint refused", path=str(entry.path), reason=entry.reason)
            training.progress.say(f"left out {entry.path}: {entry.reason}")
        if found is not None:
            training.status.enter("load", found.step)
            load(found, state_of(training), world)
            done = found.step
    if world.is_main:
        forget_after(run, done)
        run.event("start", step=done, world_size=world.size, plan=training.step.plan.describe())
    return done


def _report(training: Training, unread: list[StepResult], clock: Clock, *, leave: int) -> bool:
    """Write and show the numbers of all but the `leave` newest results; returns whether a rank asked to stop."""
    stopping = False
    while len(unread) > leave:
        result = unread.pop(0)
        numbers = result.numbers  # waits for the step
        metrics = _measure(training, result, clock.lap())
        training.metrics.write(metrics)
        training.progress.step(metrics)
        clock.skipped = clock.skipped + 1 if numbers.skipped else 0
        if numbers.skipped:
            _note_skipped(training, metrics, clock.skipped)
        stopping = stopping or numbers.stop
    return stopping


def _measure(training: Training, result: StepResult, seconds: float) -> Metrics:
    numbers, rate = result.numbers, training.rates
    return Metrics(
        step=result.step + 1,
        loss=numbers.loss,
        grad_norm=numbers.grad_norm,
        lr=result.lr,
        units=round(numbers.weight),
        seconds=seconds,
        mfu=rate.mfu(seconds),
        memory_bytes=memory_bytes(training.world.device),
        skipped=numbers.skipped,
        unit=rate.unit,
    )


def _note_skipped(training: Training, metrics: Metrics, in_a_row: int) -> None:
    if training.world.is_main:
        training.run.event(
            "step skipped", step=metrics.step, loss=str(metrics.loss), grad_norm=str(metrics.grad_norm)
        )
    if in_a_row >= MOST_SKIPPED:
        raise FloatingPointError(
            f"{in_a_row} steps in a row had no finite gradient (last: step {metrics.step}, loss {metrics.loss}, norm "
            f"{metrics.grad_norm}); weights are those of step {metrics.step - in_a_row}. Try a lower optimizer.lr, a "
            "longer optimizer.warmup, or train.precision=fp32 to see where it begins"
        )


def _evaluate(training: Training, done: int) -> Evaluation | None:
    settings, world = training.settings, training.world
    if training.datasets.eval is None:
        return None
    assert settings.plan is not None
    training.status.enter("eval", done)
    began = time.perf_counter()
    held_out = eval_batches(training.datasets.eval, settings.job, settings.plan, world)
    result = evaluate(training.model, training.objective, held_out, world)
    training.metrics.write_eval(done, result.loss, result.weight, time.perf_counter() - began)
    training.progress.say(
        f"eval after step {done}: loss {result.loss:.4f} over {result.weight:,} {training.rates.unit}"
    )
    return result


def _save(training: Training, done: int) -> None:
    settings, world, run = training.settings, training.world, training.run
    training.status.enter("save", done)
    synchronise_buffers(training.model, world)
    began = time.perf_counter()
    assert settings.plan is not None
    facts = {
        "job": settings.job.model_dump(mode="json"),
        "plan": settings.plan.model_dump(),
        "world_size": world.size,
        "vocab": training.datasets.vocab,
    }
    path = save(run.checkpoints, done, state_of(training), facts, world, keep=settings.checkpoint.keep)
    if world.is_main:
        seconds = round(time.perf_counter() - began, 3)
        run.event("save", step=done, path=str(path), seconds=seconds)


def introduce(training: Training, done: int) -> None:
    """Say what is about to run, and write it into the run directory."""
    settings, world = training.settings, training.world
    if not world.is_main:
        return
    plan, job = settings.plan, settings.job
    assert plan is not None
    count, micro = plan.micro_batches(job.train.global_batch)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    say = training.progress.say
    say(
        f"model    {job.model.family} {job.model.preset or ''}: {parameters:,} parameters, {job.train.precision}"
    )
    say(
        f"data     {job.data.source}"
        + (f", vocabulary {training.datasets.vocab:,}" if training.datasets.vocab else "")
    )
    say(f"plan     {plan.describe()} over {world.size} x {world.device.type}, {world.backend}")
    say(
        f"batch    {job.train.global_batch} samples = {plan.data_degree} ranks x {count} micro-batches x {micro}"
    )
    say(f"run      {training.run.path}" + (f", going on after step {done}" if done else ""))
    write_whole(training.run.job_file, settings.to_toml())


def conclude(training: Training, done: int, stopped: bool) -> None:
    """Say what came of it."""
    world, run, say = training.world, training.run, training.progress.say
    held = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    held[world.rank] = memory_bytes(world.device) / GIB
    if world.size > 1:
        dist.all_reduce(held)
    if not world.is_main:
        return
    run.event("stop" if stopped else "end", step=done)
    memory = " ".join(f"{gib:.2f}" for gib in held.tolist())
    say(f"{'stopped' if stopped else 'done'}     after step {done} of {training.settings.train.steps}")
    say(f"memory   {memory} GiB by rank")
    if newest_here := list_checkpoints(run.checkpoints)[0]:
        say(f"saved    {newest_here[-1].path}")
