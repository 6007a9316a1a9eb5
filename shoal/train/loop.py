"""`train`: a run from its settings to its last checkpoint, on one rank of a world."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch

from shoal.config import Settings
from shoal.data.batches import batches, eval_batches, numbers_of
from shoal.data.cut import StepBatch
from shoal.observe.metrics import Metrics, memory_bytes, reserved_bytes
from shoal.observe.report import write_report
from shoal.observe.status import RankStatus
from shoal.parallel.host import Sent, nothing_sent
from shoal.resilience.faults import show_state
from shoal.resilience.handover import hand_over
from shoal.run import Run
from shoal.train.evaluate import Evaluation, evaluate
from shoal.train.filled import memory_told
from shoal.train.keep import (
    compare_copies,
    copy_to_memory,
    get_ready_to_save,
    save_and_wait,
    save_or_go_on,
    wait_for_save,
)
from shoal.train.load import go_back, goes_on, resume
from shoal.train.nonfinite import find_cause
from shoal.train.pauses import Pauses
from shoal.train.result import StepResult
from shoal.train.setup import Training, set_up
from shoal.train.spikes import Span, SpikeError
from shoal.train.tell import already_done, conclude, introduce
from shoal.world import World

EXPLAINED_EVERY = 10  # steps in a row without an update: the cause of the first, the 11th, ... is looked for
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
    with hand_over(settings.checkpoint, run, world) as saves:
        empty = goes_on(settings, run, world)
        training = set_up(settings, world, run, status, saves=saves, empty=empty)
        show_state(status, training.state)
        done = resume(training)
        if done < settings.train.steps:
            done = _to_the_end(training, done, stop)
        else:
            already_done(training, done)
    status.finish(done)


def _to_the_end(training: Training, done: int, stop: StopFlag) -> int:
    """Train from `done` on, save and conclude; returns the steps that are done."""
    with training.progress:
        introduce(training, done)
        with Pauses() as pauses, memory_told(training.step, training.world.device, training.saves):
            get_ready_to_save(training, done)
            done, stopped = _train_past_spikes(training, done, stop, pauses)
        if not stopped:
            _evaluate(training, done)
        if stopped or training.settings.checkpoint.last:
            save_and_wait(training, done)
        else:
            wait_for_save(training, done)
        conclude(training, done, stopped)
    training.metrics.close()
    if training.world.is_main:
        write_report(training.run)
    return done


def _train_past_spikes(training: Training, done: int, stop: StopFlag, pauses: Pauses) -> tuple[int, bool]:
    """As `train_steps`; after a spike once more, from before it and without its data."""
    if training.spikes is not None and not done:
        save_and_wait(training, 0)  # so that there is always something to go back to
    while True:
        try:
            return train_steps(training, done, stop, pauses)
        except SpikeError as found:
            done = go_back(training, found.spike)


def train_steps(training: Training, done: int, stop: StopFlag, pauses: Pauses) -> tuple[int, bool]:
    """Take steps from `done` on; returns how many are done and whether a rank asked to stop.

    On a GPU, numbers of a step are read while the next one runs, so that the device is never waited for.
    """
    status, steps = training.status, training.settings.train.steps
    asynchronous = training.world.device.type == "cuda"
    unread: list[StepResult] = []
    clock, stopped = Clock(training.world.device), False

    def read() -> None:
        nonlocal stopped
        stopped = _report(training, unread, clock) or stopped

    status.enter("data", done)
    for batch in _batches(training, done, steps):
        done = batch.step + 1
        due_eval, due_save, due_copy = (_is_due(every, done, steps) for every in _periods(training.settings))
        follows = done < steps and not (due_eval or due_save or due_copy)
        unread.append(training.step(batch, stop=stop.requested, before_update=read, ahead=follows))
        pauses.after_step(done)
        # no state may be kept before it is known whether its last loss was a spike
        overlaps = training.saves is not None and training.saves.overlaps and training.spikes is None
        in_line = due_save and not overlaps
        if not asynchronous or due_eval or in_line or due_copy:
            read()
        if due_copy:
            copy_to_memory(training, done)
        elif _is_due(training.settings.run.compare_every, done, steps):
            compare_copies(training, done)
        if stopped:
            break
        if due_eval:
            _evaluate(training, done)
        if due_save:
            save_or_go_on(training, done)
        if due_eval or in_line:
            clock.restart()
        status.enter("data", done)
    read()
    return done, stopped and done < steps


class Clock:
    """Seconds between the ends of steps: by the device where it has a clock, since the host reads them late."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.skipped = device, 0
        self._before: Sent | None = None
        self.restart()

    def lap(self, result: StepResult) -> float:
        """Seconds that a step took."""
        now = time.perf_counter()
        seconds = result.sent.seconds_after(self._before) if self._before is not None else None
        self._before, waited, self._last = result.sent, now - self._last, now
        return waited if seconds is None else seconds

    def restart(self) -> None:
        """Between steps: do not count what happened since the last lap."""
        self._last, self._before = time.perf_counter(), nothing_sent(self._device)

    def interrupted(self) -> None:
        """As `restart`, within a step of which the device has done some: this one is timed by the host."""
        self._last, self._before = time.perf_counter(), None


def _periods(settings: Settings) -> tuple[int, int, int]:
    return settings.train.eval_every, settings.checkpoint.every, settings.checkpoint.memory_every


def _is_due(every: int, done: int, steps: int) -> bool:
    return every > 0 and done % every == 0 and done < steps


def _batches(training: Training, done: int, steps: int) -> Iterator[StepBatch]:
    """The batches of steps from `done` on; data that is skipped moves those after it up."""
    spans = [Span(done, done, steps - done)]
    for span in spans if training.spikes is None else training.spikes.spans(done, steps):
        number = span.step
        with closing(_data(training, span)) as found:
            for number, batch in enumerate(found, start=span.step + 1):
                yield batch._replace(step=number - 1)
        if number < span.step + span.count:  # the data has ended
            return


def _data(training: Training, span: Span) -> Generator[StepBatch]:
    settings = training.settings
    return batches(
        training.datasets.train,
        settings.job,
        training.plan,
        training.world,
        start=span.data,
        stop=span.data + span.count,
        bad=training.bad.train,
        deadline_s=settings.run.deadline_s,
        ahead=span.data - span.step,
    )


def _report(training: Training, unread: list[StepResult], clock: Clock) -> bool:
    """Write and show the numbers of results; returns whether a rank asked to stop. Collective where a step was skipped."""
    stopping = False
    while unread:
        result = unread.pop(0)
        numbers = result.numbers  # waits for the step
        metrics = _measure(training, result, clock.lap(result))
        training.metrics.write(metrics)
        training.progress.step(metrics)
        clock.skipped = clock.skipped + 1 if numbers.skipped else 0
        if numbers.skipped:
            _note_skipped(training, result, metrics, clock)
        elif training.spikes is not None:
            training.spikes.take(result.step, numbers.loss)
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
        memory_bytes=memory_bytes(training.world.device, training.step.shared_bytes),
        skipped=numbers.skipped,
        unit=rate.unit,
        reserved_bytes=reserved_bytes(training.world.device, training.step.shared_bytes),
    )


def _note_skipped(training: Training, result: StepResult, metrics: Metrics, clock: Clock) -> None:
    in_a_row, cause = clock.skipped, None
    if in_a_row % EXPLAINED_EVERY == 1:
        training.status.enter("diagnose", result.step)
        samples = numbers_of(training.datasets.train, training.settings.job)
        cause = find_cause(training.step, result, samples)
        training.progress.say(f"step {metrics.step} was skipped: {cause.message}")
        clock.interrupted()
    if training.world.is_main:
        numbers = {"loss": str(metrics.loss), "grad_norm": str(metrics.grad_norm)}
        training.run.event("step skipped", step=metrics.step, **numbers, **(cause.record() if cause else {}))
    if in_a_row >= MOST_SKIPPED:
        raise FloatingPointError(
            f"{in_a_row} steps in a row had no finite gradient (last: step {metrics.step}, loss {metrics.loss}, norm "
            f"{metrics.grad_norm}); weights are those of step {metrics.step - in_a_row}. Try a lower optimizer.lr, a "
            "longer optimizer.warmup, or train.precision=fp32 to see where it begins; events.jsonl has what was found"
        )


def _evaluate(training: Training, done: int) -> Evaluation | None:
    settings, world = training.settings, training.world
    if training.datasets.eval is None:
        return None
    training.status.enter("eval", done)
    began = time.perf_counter()
    held_out = eval_batches(
        training.datasets.eval,
        settings.job,
        training.plan,
        world,
        bad=training.bad.eval,
        deadline_s=settings.run.deadline_s,
    )
    result = evaluate(training.model, training.objective, held_out, world, training.plan.attention)
    training.metrics.write_eval(done, result.loss, result.weight, time.perf_counter() - began)
    training.progress.say(
        f"eval after step {done}: loss {result.loss:.4f} over {result.weight:,} {training.rates.unit}"
    )
    return result
