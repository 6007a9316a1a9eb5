"""`train`: a run from its settings to its last checkpoint, on one rank of a world."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shoal.checkpoint.folder import Checkpoint, CheckpointError
from shoal.checkpoint.store import load_newest, newest, save
from shoal.config import Settings
from shoal.data.batches import batches, eval_batches
from shoal.data.cut import StepBatch
from shoal.observe.metrics import Metrics, forget_after, memory_bytes, reserved_bytes
from shoal.observe.report import write_report
from shoal.observe.status import RankStatus
from shoal.parallel.apply import synchronise_buffers
from shoal.resilience.collectives import require_same_calls
from shoal.resilience.faults import show_state
from shoal.resilience.replicas import require_equal_replicas
from shoal.run import Run
from shoal.train.evaluate import Evaluation, evaluate
from shoal.train.pauses import Pauses
from shoal.train.resume import require_same_numbers
from shoal.train.setup import Training, facts_of, set_up
from shoal.train.step import StepResult
from shoal.train.tell import already_done, conclude, introduce
from shoal.world import World

MOST_SKIPPED = 50  # steps in a row without an update, after which a run is lost


class StopFlag(Protocol):
    """Set by a signal; asks for an orderly end."""

    @property
    def requested(self) -> bool: ...


def train(settings: Settings, world: World, status: RankStatus, stop: StopFlag) -> None:
    """Train until the job's last step, or until some rank is asked to stop; then save. Collective.

    `settings.plan` is set, and the data is prepared or is made by import path.
    """
    run = Run(Path(settings.run.dir))
    world.agree("job", settings.to_toml())
    status.enter("setup", 0)
    training = set_up(settings, world, run, status)
    show_state(status, training.state)
    done = resume(training)
    if done >= settings.train.steps:
        already_done(training, done)
        status.finish(done)
        return
    with training.progress:
        introduce(training, done)
        with Pauses() as pauses:
            done, stopped = train_steps(training, done, stop, pauses)
        if not stopped:
            _evaluate(training, done)
        if stopped or settings.checkpoint.last:
            _save(training, done)
        conclude(training, done, stopped)
    training.metrics.close()
    if world.is_main:
        write_report(run)
    status.finish(done)


def train_steps(training: Training, done: int, stop: StopFlag, pauses: Pauses) -> tuple[int, bool]:
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
        pauses.after_step(done)
        due_eval, due_save, due_copy = (_is_due(every, done, steps) for every in _periods(training.settings))
        numbers_are_due = not asynchronous or due_eval or due_save or due_copy
        stopped = _report(training, unread, clock, leave=int(not numbers_are_due))
        if due_copy:
            _copy(training, done)
        elif _is_due(training.settings.run.compare_every, done, steps):
            _compare(training, done)
        if stopped:
            break
        if due_eval:
            _evaluate(training, done)
        if due_save:
            _save_or_go_on(training, done)
        if due_eval or due_save:
            clock.restart()
        status.enter("data", done)
    stopped = _report(training, unread, clock, leave=0) or stopped
    return done, stopped and done < steps


class Clock:
    """Seconds between the ends of steps: by the device where it has a clock, since the host reads them late."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._before: StepResult | None = None
        self.skipped = 0

    def lap(self, result: StepResult) -> float:
        """Seconds that a step took."""
        now = time.perf_counter()
        seconds = result.seconds_after(self._before) if self._before is not None else None
        self._before, waited, self._last = result, now - self._last, now
        return waited if seconds is None else seconds

    def restart(self) -> None:
        """Do not count what happened since the last lap."""
        self._last, self._before = time.perf_counter(), None


def _periods(settings: Settings) -> tuple[int, int, int]:
    return settings.train.eval_every, settings.checkpoint.every, settings.checkpoint.memory_every


def _is_due(every: int, done: int, steps: int) -> bool:
    return every > 0 and done % every == 0 and done < steps


def _batches(training: Training, done: int, steps: int) -> Iterator[StepBatch]:
    settings = training.settings
    return batches(
        training.datasets.train,
        settings.job,
        training.plan,
        training.world,
        start=done,
        stop=steps,
        deadline_s=settings.run.deadline_s,
    )


def resume(training: Training) -> int:
    """Load the newest checkpoint that is whole, if there is one; returns the steps that are done. Collective.

    Raises:
        ValueError: the checkpoint is of a job with other numbers; the message names the keys.
        CheckpointError: there are checkpoints, and none is whole.
    """
    settings, world, run = training.settings, training.world, training.run
    done = 0
    if settings.run.resume:
        in_memory = _from_memory(training)
        done = _from_disk(training) if in_memory is None else in_memory
    elif world.is_main and (aside := run.set_aside()):
        training.progress.say(f"set aside what an earlier run left: {aside}")
    forget_after(run, world.rank, done)
    if world.is_main:
        run.event("start", step=done, world_size=world.size, plan=training.plan.describe())
    return done


def _from_memory(training: Training) -> int | None:
    """Go on from the launcher's memory if it has a newer state than the disk; returns the steps that are done. Collective."""
    snapshots = training.snapshots
    if snapshots is None:
        return None
    done = snapshots.newest(training.world)
    on_disk, _ = newest(training.run.checkpoints, training.world)
    if done is None or (on_disk is not None and on_disk.step >= done):
        snapshots.forget()
        return None
    training.status.enter("load", done)
    snapshots.give_back(done, training.state())
    return done


def _from_disk(training: Training) -> int:
    """Load the newest checkpoint that is whole; returns the steps that are done."""
    run, world = training.run, training.world

    def accept(found: Checkpoint) -> None:
        require_same_numbers(found, training.settings.job)
        training.status.enter("load", found.step)

    found, refused = load_newest(run.checkpoints, training.state, world, accept=accept)
    for entry in refused if world.is_main else []:
        run.event("checkpoint refused", path=str(entry.path), reason=entry.reason)
        training.progress.say(f"left out {entry.path}: {entry.reason}")
    return found.step if found is not None else 0


def _copy(training: Training, done: int) -> None:
    """Into the launcher's memory."""
    assert training.snapshots is not None
    training.status.enter("copy", done)
    training.snapshots.take(done, _state_to_keep(training, done))


def _compare(training: Training, done: int) -> None:
    """The state of all replicas."""
    training.status.enter("compare", done)
    require_equal_replicas(training.state(), training.plan, training.world, done)


def _state_to_keep(training: Training, done: int) -> dict[str, Tensor]:
    """The state, of which all replicas have the same."""
    synchronise_buffers(training.model, training.world)
    state = training.state()
    require_equal_replicas(state, training.plan, training.world, done)
    return state


def _report(training: Training, unread: list[StepResult], clock: Clock, *, leave: int) -> bool:
    """Write and show the numbers of all but the `leave` newest results; returns whether a rank asked to stop."""
    stopping = False
    while len(unread) > leave:
        result = unread.pop(0)
        numbers = result.numbers  # waits for the step
        metrics = _measure(training, result, clock.lap(result))
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
        reserved_bytes=reserved_bytes(training.world.device),
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
    training.status.enter("eval", done)
    began = time.perf_counter()
    held_out = eval_batches(
        training.datasets.eval, settings.job, training.plan, world, deadline_s=settings.run.deadline_s
    )
    result = evaluate(training.model, training.objective, held_out, world)
    training.metrics.write_eval(done, result.loss, result.weight, time.perf_counter() - began)
    training.progress.say(
        f"eval after step {done}: loss {result.loss:.4f} over {result.weight:,} {training.rates.unit}"
    )
    return result


def _save_or_go_on(training: Training, done: int) -> None:
    """Save; if that fails, as on a full disk, the run goes on and may be luckier with the next."""
    try:
        _save(training, done)
    except CheckpointError as error:
        if training.world.is_main:
            training.run.event("save failed", step=done, reason=str(error))
        training.progress.say(f"NOT saved: {error}")


def _save(training: Training, done: int) -> None:
    settings, world, run = training.settings, training.world, training.run
    training.status.enter("save", done)
    began = time.perf_counter()
    require_same_calls(run, world)
    state, facts = _state_to_keep(training, done), facts_of(training)
    path = save(run.checkpoints, done, state, facts, world, keep=settings.checkpoint.keep)
    if world.is_main:
        seconds = round(time.perf_counter() - began, 3)
        run.event("save", step=done, path=str(path), seconds=seconds)
