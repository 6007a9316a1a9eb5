"""What a run keeps of its state as it goes: checkpoints on disk, handed over or written by the ranks, and copies in memory."""

from __future__ import annotations

import time
from contextlib import suppress

from torch import Tensor

from shoal.checkpoint.folder import CheckpointError, list_checkpoints
from shoal.checkpoint.store import save
from shoal.parallel.apply import synchronise_buffers
from shoal.resilience.collectives import require_same_calls
from shoal.resilience.epochs import taken_over
from shoal.resilience.replicas import require_equal_replicas
from shoal.train.setup import Training, facts_of
from shoal.train.spikes import is_before


def save_or_go_on(training: Training, done: int) -> None:
    """Save; if that fails, as on a full disk, the run goes on and may be luckier with the next."""
    try:
        if not _hand_over(training, done):
            save_and_wait(training, done)
    except CheckpointError as error:
        if training.world.is_main:
            training.run.event("save failed", step=done, reason=str(error))
        training.progress.say(f"NOT saved: {error}")


def get_ready_to_save(training: Training, done: int) -> None:
    """Begin to make what saves are handed over in, if one is due before the end and no step is to be recorded meanwhile."""
    every, saves = training.settings.checkpoint.every, training.saves
    if saves is None or training.step.is_recorded:
        return
    if not every or (done // every + 1) * every >= training.settings.train.steps:
        return
    with suppress(CheckpointError):  # which the first save says
        saves.get_ready(training.state())
    if saves.problem:
        _tell(training, saves.problem)


def _hand_over(training: Training, done: int) -> bool:
    """Copy what is to be saved and leave the rest to who writes; false if nobody takes saves."""
    saves, run = training.saves, training.run
    if saves is None or saves.problem:
        return False
    training.status.enter("save", done)
    began = time.monotonic()
    waited_s = wait_for_save(training, done)
    if waited_s and training.world.is_main:
        run.event("save waited", step=done, seconds=round(waited_s, 3))
    require_same_calls(run, training.world)
    state, facts = _state_to_keep(training, done), facts_of(training)
    if saves.take(done, state, facts, began, keep=_number_to_keep(training, done)):
        return True
    _tell(training, saves.problem)
    return False


def _tell(training: Training, problem: str) -> None:
    """Why ranks write themselves."""
    if training.world.is_main:
        training.run.event("alert", rank=0, message=problem)
    training.progress.say(problem)


def wait_for_save(training: Training, done: int) -> float:
    """Until the save before is done with; returns the seconds that took."""
    if training.saves is None:
        return 0.0
    return training.saves.wait(lambda: training.status.enter("save", done))


def save_and_wait(training: Training, done: int) -> None:
    """Save, and wait until it is a checkpoint."""
    world, run = training.world, training.run
    training.status.enter("save", done)
    wait_for_save(training, done)
    began = time.perf_counter()
    require_same_calls(run, world)
    state, facts = _state_to_keep(training, done), facts_of(training)
    keep = _number_to_keep(training, done)
    path = save(run.checkpoints, done, state, facts, world, keep=keep, refused=lambda: taken_over(run))
    if world.is_main:
        seconds = round(time.perf_counter() - began, 3)
        run.event("save", step=done, path=str(path), seconds=seconds, stall_s=seconds)


def _number_to_keep(training: Training, done: int) -> int:
    """Checkpoints that stay when there is one more, after `done` steps: there must be one of before any spike to come."""
    settings = training.settings
    if training.spikes is None or not training.world.is_main:
        return settings.checkpoint.keep
    reach = max(0, done - settings.train.spike_rewind)
    there = list_checkpoints(training.run.checkpoints)[0]
    fits = (n for n, found in enumerate(reversed(there), 1) if is_before(found, reach, training.spikes.skips))
    return max(settings.checkpoint.keep, 1 + next(fits, len(there)))


def copy_to_memory(training: Training, done: int) -> None:
    """Into the launcher's memory."""
    assert training.snapshots is not None
    training.status.enter("copy", done)
    training.snapshots.take(done, _state_to_keep(training, done), training.world)


def compare_copies(training: Training, done: int) -> None:
    """The state of all replicas."""
    training.status.enter("compare", done)
    require_equal_replicas(training.state(), training.plan, training.world, done)


def _state_to_keep(training: Training, done: int) -> dict[str, Tensor]:
    """The state, of which all replicas have the same."""
    synchronise_buffers(training.model, training.world)
    state = training.state()
    require_equal_replicas(state, training.plan, training.world, done)
    return state
