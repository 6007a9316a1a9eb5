"""`train`: a run from its settings to its last checkpoint, on one rank of a world."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shoal.checkpoint.folder import Checkpoint, CheckpointError, list_checkpoints
from shoal.checkpoint.store import load_newest, newest, save
from shoal.config import Settings
from shoal.data.batches import batches, eval_batches, numbers_of
from shoal.data.cut import StepBatch
from shoal.observe.metrics import Metrics, forget_after, memory_bytes, reserved_bytes
from shoal.observe.report import write_report
from shoal.observe.status import RankStatus
from shoal.parallel.apply import synchronise_buffers
from shoal.resilience.collectives import require_same_calls
from shoal.resilience.faults import show_state
from shoal.resilience.handover import hand_over
from shoal.resilience.replicas import require_equal_replicas
from shoal.run import Run
from shoal.train.bad import remember_events, remember_manifest
from shoal.train.evaluate import Evaluation, evaluate
from shoal.train.filled import memory_told
from shoal.train.nonfinite import find_cause
from shoal.train.pauses import Pauses
from shoal.train.resume import require_same_numbers
from shoal.train.setup import Training, facts_of, set_up
from shoal.train.spikes import Span, Spike, SpikeError, is_before
from shoal.train.step import StepResult
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
        training = set_up(settings, world, run, status, saves=saves)
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
        with Pauses() as pauses, memory_told(training.step, training.world.device):
            done, stopped = _train_past_spikes(training, done, stop, pauses)
        if not stopped:
            _evaluate(training, done)
        if stopped or training.settings.checkpoint.last:
            _save(training, done)
        else:
            _wait_for_save(training, done)
        conclude(training, done, stopped)
    training.metrics.close()
    if training.world.is_main:
        write_report(training.run)
    return done


def _train_past_spikes(training: Training, done: int, stop: StopFlag, pauses: Pauses) -> tuple[int, bool]:
    """As `train_steps`; after a spike once more, from before it and without its data."""
    if training.spikes is not None and not done:
        _save(training, 0)  # so that there is always something to go back to
    while True:
        try:
            return train_steps(training, done, stop, pauses)
        except SpikeError as found:
            done = _go_back(training, found.spike)


def train_steps(training: Training, done: int, stop: StopFlag, pauses: Pauses) -> tuple[int, bool]:
    """Take steps from `done` on; returns how many are done and whether a rank asked to stop.

    On a GPU, numbers of a step are read while the next one runs, so that the device is never waited for.
    """
    status, steps = training.status, training.settings.train.steps
    asynchronous = training.world.device.type == "cuda"
    unread: list[StepResult] = []
    clock, stopped = Clock(), False

    def read() -> None:
        nonlocal stopped
        stopped = _report(training, unread, clock) or stopped

    status.enter("data", done)
    for batch in _batches(training, done, steps):
        unread.append(training.step(batch, stop=stop.requested, before_update=read))
        done = batch.step + 1
        pauses.after_step(done)
        due_eval, due_save, due_copy = (_is_due(every, done, steps) for every in _periods(training.settings))
        # no state may be kept before it is known whether its last loss was a spike
        overlaps = training.saves is not None and training.saves.overlaps and training.spikes is None
        in_line = due_save and not overlaps
        if not asynchronous or due_eval or in_line or due_copy:
            read()
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
        if due_eval or in_line:
            clock.restart()
        status.enter("data", done)
    read()
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
    )


def _go_back(training: Training, spike: Spike) -> int:
    """Load the newest checkpoint of before the data of a spike, which is skipped from now on; returns its steps. Collective."""
    run, world, spikes = training.run, training.world, training.spikes
    assert spikes is not None
    skips = spikes.skips  # a checkpoint may be older than some of them
    _wait_for_save(training, spike.begin)
    training.status.enter("load", spike.begin)
    found, _ = load_newest(
        run.checkpoints,
        training.state,
        world,
        accept=lambda checkpoint: None,
        among=lambda checkpoint: is_before(checkpoint, spike.begin, skips),
    )
    if found is None:
        raise CheckpointError(
            f"the loss of step {spike.step + 1} is a spike ({spike.loss:g}), and {run.checkpoints} has no checkpoint of step "
            f"{spike.begin} or before to go back to; lower train.spike_rewind, or begin with train.spike = 0"
        )
    spikes.skip(spike, skips)
    if training.snapshots is not None:
        training.snapshots.forget()
    forget_after(run, world.rank, found.step)
    _say_gone_back(training, spike, found.step)
    return found.step


def _number_to_keep(training: Training, done: int) -> int:
    """Checkpoints that stay when there is one more, after `done` steps: there must be one of before any spike to come."""
    settings = training.settings
    if training.spikes is None or not training.world.is_main:
        return settings.checkpoint.keep
    reach = max(0, done - settings.train.spike_rewind)
    there = list_checkpoints(training.run.checkpoints)[0]
    fits = (n for n, found in enumerate(reversed(there), 1) if is_before(found, reach, training.spikes.skips))
    return max(settings.checkpoint.keep, 1 + next(fits, len(there)))


def _say_gone_back(training: Training, spike: Spike, to: int) -> None:
    score, first = round(min(spike.score, 1e6), 2), spike.begin + 1
    if training.world.is_main:
        about = {"loss": spike.loss, "score": score, "to": to, "skipped_from": first, "skipped": spike.length}
        training.run.event("rewind", step=spike.step + 1, **about)
    training.progress.say(
        f"loss {spike.loss:.4f} of step {spike.step + 1} is a spike, {score:.1f} deviations above those before it: back to step "
        f"{to}, and from step {first} on without the data of {spike.length} steps"
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
        if done:
            remember_events(training.bad.train.known, run)
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
    if found is not None:
        remember_manifest(training.bad.train.known, found.manifest)
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
        memory_bytes=memory_bytes(training.world.device),
        skipped=numbers.skipped,
        unit=rate.unit,
        reserved_bytes=reserved_bytes(training.world.device),
    )


def _note_skipped(training: Training, result: StepResult, metrics: Metrics, clock: Clock) -> None:
    in_a_row, cause = clock.skipped, None
    if in_a_row % EXPLAINED_EVERY == 1:
        training.status.enter("diagnose", result.step)
        samples = numbers_of(training.datasets.train, training.settings.job)
        cause = find_cause(training.step, result, samples)
        training.progress.say(f"step {metrics.step} was skipped: {cause.message}")
        clock.restart()
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
    result = evaluate(training.model, training.objective, held_out, world)
    training.metrics.write_eval(done, result.loss, result.weight, time.perf_counter() - began)
    training.progress.say(
        f"eval after step {done}: loss {result.loss:.4f} over {result.weight:,} {training.rates.unit}"
    )
    return result


def _save_or_go_on(training: Training, done: int) -> None:
    """Save; if that fails, as on a full disk, the run goes on and may be luckier with the next."""
    try:
        if not _hand_over(training, done):
            _save(training, done)
    except CheckpointError as error:
        if training.world.is_main:
            training.run.event("save failed", step=done, reason=str(error))
        training.progress.say(f"NOT saved: {error}")


def _hand_over(training: Training, done: int) -> bool:
    """Copy what is to be saved and leave the rest to who writes; false if nobody takes saves."""
    saves, run = training.saves, training.run
    if saves is None or saves.problem:
        return False
    training.status.enter("save", done)
    began = time.monotonic()
    waited_s = _wait_for_save(training, done)
    if waited_s and training.world.is_main:
        run.event("save waited", step=done, seconds=round(waited_s, 3))
    state, facts = _state_to_keep(training, done), facts_of(training)
    if saves.take(done, state, facts, began, keep=_number_to_keep(training, done)):
        return True
    if training.world.is_main:
        run.event("alert", rank=0, message=saves.problem)
    training.progress.say(saves.problem)
    return False


def _wait_for_save(training: Training, done: int) -> float:
    """Until the save before is done with; returns the seconds that took."""
    if training.saves is None:
        return 0.0
    return training.saves.wait(lambda: training.status.enter("save", done))


def _save(training: Training, done: int) -> None:
    """Save, and wait until it is a checkpoint."""
    world, run = training.world, training.run
    training.status.enter("save", done)
    _wait_for_save(training, done)
    began = time.perf_counter()
    require_same_calls(run, world)
    state, facts = _state_to_keep(training, done), facts_of(training)
    path = save(run.checkpoints, done, state, facts, world, keep=_number_to_keep(training, done))
    if world.is_main:
        seconds = round(time.perf_counter() - began, 3)
        run.event("save", step=done, path=str(path), seconds=seconds, stall_s=seconds)
