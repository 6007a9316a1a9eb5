"""Where a run goes on from: the launcher's memory, the newest checkpoint that is whole, or one of before a spike."""

from __future__ import annotations

import time

from shoal.checkpoint.folder import Checkpoint, CheckpointError, list_checkpoints, remove_after
from shoal.checkpoint.store import load_newest, newest
from shoal.config import Settings
from shoal.observe.metrics import forget_after
from shoal.parallel.initialise import give_weights
from shoal.resilience.snapshot import is_something_kept
from shoal.run import Run, read_json_lines
from shoal.train.bad import remember_events, remember_manifest
from shoal.train.keep import wait_for_save
from shoal.train.resume import require_same_numbers
from shoal.train.setup import Training
from shoal.train.spikes import Spike, is_before
from shoal.world import World


def goes_on(settings: Settings, run: Run, world: World) -> bool:
    """Whether there seems to be a state to load, so that no initial weights are needed. Collective: as rank 0 sees it."""
    found = None
    if world.is_main:
        there = settings.run.resume and (is_something_kept() or bool(list_checkpoints(run.checkpoints)[0]))
        found = "yes" if there else "no"
    return world.broadcast_text(found) == "yes"


def resume(training: Training) -> int:
    """Load the newest checkpoint that is whole, if there is one; returns the steps that are done. Collective.

    Raises:
        ValueError: the checkpoint is of a job with other numbers; the message names the keys.
        CheckpointError: there are checkpoints, and none is whole.
    """
    settings, world, run = training.settings, training.world, training.run
    loaded, took, began = None, {}, time.monotonic()
    if settings.run.resume:
        in_memory = _from_memory(training)
        loaded = _from_disk(training) if in_memory is None else in_memory
        took = {} if loaded is None else {"load_s": round(time.monotonic() - began, 3)}
        if loaded:
            remember_events(training.bad.train.known, run)
    else:
        if world.is_main and (aside := run.set_aside()):
            training.progress.say(f"set aside what an earlier run left: {aside}")
        if training.snapshots is not None:
            training.snapshots.forget(world)
    if loaded is None and training.empty:  # what there seemed to be has gone
        give_weights(training.model, settings.job.train.seed)
    done = loaded or 0
    forget_after(run, world.rank, done)
    if world.is_main:
        _tell_again(training, done)
        run.event("start", step=done, world_size=world.size, plan=training.plan.describe(), **took)
    return done


def _tell_again(training: Training, done: int) -> None:
    """After a restart: which steps are taken again, and what would have kept them."""
    last = None
    for event in read_json_lines(training.run.events_file):
        last = event if event["event"] in ("restart", "start", "end", "stop") else last
    if last is None or last["event"] != "restart" or last.get("step", 0) <= done + 1:
        return
    policy = training.settings.checkpoint
    keeps = (
        ""
        if policy.every or policy.memory_every
        else "; checkpoint.every, or checkpoint.memory_every, would keep them"
    )
    training.progress.say(
        f"again    steps {done + 1} to {last['step']} are taken again, from {_of(done)}{keeps}"
    )


def _of(done: int) -> str:
    return f"what was saved after step {done}" if done else "the beginning"


def _from_memory(training: Training) -> int | None:
    """Go on from the launcher's memory if it has a newer state than the disk; returns the steps that are done. Collective."""
    snapshots = training.snapshots
    if snapshots is None:
        return None
    done = snapshots.newest(training.world)
    on_disk, _ = newest(training.run.checkpoints, training.world)
    if done is None or (on_disk is not None and on_disk.step >= done):
        snapshots.forget(training.world)
        return None
    training.status.enter("load", done)
    snapshots.give_back(training.state(), training.world)
    return done


def _from_disk(training: Training) -> int | None:
    """Load the newest checkpoint that is whole; returns the steps that are done, None if there is none."""
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
    return found.step if found is not None else None


def go_back(training: Training, spike: Spike) -> int:
    """Load the newest checkpoint of before the data of a spike, which is skipped from now on; returns its steps. Collective."""
    run, world, spikes = training.run, training.world, training.spikes
    assert spikes is not None
    skips = spikes.skips  # a checkpoint may be older than some of them
    wait_for_save(training, spike.begin)
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
            f"{spike.begin} or before to go back to; in a new run.dir lower train.spike_rewind, or leave train.spike out"
        )
    if world.is_main:
        # of what is left behind now; a kill before this is done meets the spike again
        remove_after(run.checkpoints, found.step)
    world.barrier("go back")
    spikes.skip(spike, skips)
    if training.snapshots is not None:
        training.snapshots.forget(world)
    forget_after(run, world.rank, found.step)
    _say_gone_back(training, spike, found.step)
    return found.step


def _say_gone_back(training: Training, spike: Spike, to: int) -> None:
    score, first = round(min(spike.score, 1e6), 2), spike.begin + 1
    if training.world.is_main:
        about = {"loss": spike.loss, "score": score, "to": to, "skipped_from": first, "skipped": spike.length}
        training.run.event("rewind", step=spike.step + 1, **about)
    training.progress.say(
        f"loss {spike.loss:.4f} of step {spike.step + 1} is a spike, {score:.1f} deviations above those before it: back to step "
        f"{to}, and from step {first} on without the data of {spike.length} steps"
    )
