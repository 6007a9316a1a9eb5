"""What a run says about itself when it begins and when it ends; rank 0 speaks."""

from __future__ import annotations

import shlex
import tomllib

import tomli_w
import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.folder import list_checkpoints
from shoal.job import Model
from shoal.models.build import builder
from shoal.observe.metrics import GIB, memory_bytes
from shoal.parallel.initialise import build_on_meta
from shoal.parallel.replicate import core
from shoal.plan import Plan, runs_text
from shoal.run import CheckpointPolicy, read_json_lines, write_whole
from shoal.train.bad import bad_events
from shoal.train.setup import Training
from shoal.world import detect_cluster


def whole_parameters(training: Training) -> int:
    """Parameters of the whole model, also where a rank has some stages of it."""
    model: nn.Module | None = training.model
    if training.plan.pipeline > 1:
        model = build_on_meta(builder(training.settings.model, training.datasets.vocab)) or training.model
    return sum(parameter.numel() for parameter in model.parameters()) if model is not None else 0


def _changed(model: Model) -> str:
    """Dimensions that are said beside a preset; what follows from them is in docs/models.md."""
    said = {key: getattr(model, key) for key in ("dim", "layers", "heads", "kv_heads", "ffn")}
    words = [f"{key} {value}" for key, value in said.items() if value is not None]
    return f" with {', '.join(words)}" if words else ""


def introduce(training: Training, done: int) -> None:
    """Say what is about to run, and write it into the run directory."""
    if not training.world.is_main:
        return
    settings, world, plan, run = training.settings, training.world, training.plan, training.run
    model, train = settings.model, settings.train
    count, micro = plan.micro_batches(train.global_batch)
    parameters, vocab = whole_parameters(training), training.datasets.vocab
    say = training.progress.say
    name = f"{model.family} {model.preset}{_changed(model)}" if model.preset else model.family
    stored = getattr(core(training.model), "weights_from", None)
    say(
        f"model    {name}: {parameters:,} parameters, {train.precision}"
        + (f", beginning with the weights in {stored}" if stored else "")
    )
    say(f"data     {settings.data.source}" + (f", vocabulary {vocab:,}" if vocab else ""))
    say(f"plan     {plan.describe()}; {world.size} x {world.device.type}, {world.backend}")
    say(
        f"batch    {train.global_batch} samples = {plan.data_degree} {_many(plan.data_degree, 'rank')} x {count} "
        f"{_many(count, 'micro-batch')} x {micro}" + (f" x {runs_text(plan.shares)}" if plan.shares else "")
    )
    if (before := _plan_before(training)) and before.describe() != plan.describe():
        say(f"         it was {before.describe()}")
    if training.datasets.eval is None and vocab and settings.data.eval_fraction:
        say("eval     none: whole documents are held out, and there is one alone")
    say(f"saves    {_saves(settings.checkpoint)}")
    say(f"run      {run.path}" + (f", going on after step {done}" if done else ""))
    # going on is what a run directory is for, also where this run began anew
    policy = settings.run.model_copy(update={"resume": True})
    write_whole(run.job_file, settings.model_copy(update={"run": policy}).to_toml())
    write_whole(run.path / "plan.toml", tomli_w.dumps(plan.model_dump(exclude_none=True)))
    cluster = detect_cluster().model_copy(update={"devices_per_node": world.local_size})
    cluster = cluster.model_copy(update={"nodes": world.size // world.local_size})
    write_whole(run.path / "cluster.toml", tomli_w.dumps(cluster.model_dump(exclude_none=True)))


def _plan_before(training: Training) -> Plan | None:
    """Of a run that goes on."""
    try:
        return Plan.model_validate(tomllib.loads((training.run.path / "plan.toml").read_text()))
    except (OSError, ValueError):
        return None


def _saves(policy: CheckpointPolicy) -> str:
    told = [f"every {policy.every} steps"] if policy.every else []
    told += ["at the end"] if policy.last else []
    text = " and ".join(told) or "none"
    if not policy.every:
        text += " alone (checkpoint.every = 0)" if told else " (checkpoint.every = 0)"
    return text + (f", in memory every {policy.memory_every}" if policy.memory_every else "")


def already_done(training: Training, done: int) -> None:
    """Say that there is nothing to train."""
    if training.world.is_main:
        training.run.event("end", step=done)
        training.progress.say(
            f"done     already: {training.run.path} has {done} steps, train.steps = {training.settings.train.steps}; "
            f"train.steps={2 * done} would go on"
        )


def conclude(training: Training, done: int, stopped: bool) -> None:
    """Say what came of it. Collective."""
    held = _memory_by_rank(training)
    if not training.world.is_main:
        return
    run, say, steps = training.run, training.progress.say, training.settings.train.steps
    run.event("stop" if stopped else "end", step=done)
    records = list(read_json_lines(run.metrics_file))
    lines = [record for record in records if record.get("loss") is not None]
    say(f"{'stopped' if stopped else 'done':<8} after step {done} of {steps}")
    if lines:
        unit, seconds = training.rates.unit, sum(line["seconds"] for line in lines)
        total = sum(line[unit] for line in lines)
        say(f"loss     {lines[0]['loss']:.4f} -> {lines[-1]['loss']:.4f}")
        say(f"speed    {total / seconds:,.0f} {unit}/s over {seconds:,.1f} s of steps")
    if skipped := sum(record.get("skipped", False) for record in records):
        say(
            f"skipped  {skipped} of {done} steps made no update: loss or gradients were not finite, see events.jsonl"
        )
    if bad := {event["index"] for event in bad_events(run)}:
        say(
            f"bad      {len(bad)} {_many(len(bad), 'sample')} could not be read, and data.on_error = "
            f"{training.settings.data.on_error} did without: see events.jsonl"
        )
    say(f"memory   {', '.join(f'{gib:.2f}' for gib in held)} GiB by rank, at most")
    if newest := list_checkpoints(run.checkpoints)[0]:
        say(f"saved    {newest[-1].path}")
    say(f"report   {run.path / 'report.html'}")
    folder = shlex.quote(str(run.path))
    if stopped:
        say(f"go on:   shoal train {folder}")
    elif training.settings.run.data and newest:
        say(f'try it:  shoal sample {folder} "The beginning of a text"')


def _memory_by_rank(training: Training) -> list[float]:
    world = training.world
    held = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    held[world.rank] = memory_bytes(world.device, training.step.shared_bytes) / GIB
    if world.size > 1:
        dist.all_reduce(held)
    return held.tolist()


def _many(count: int, noun: str) -> str:
    """The noun, in plural unless there is one."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("ch") else f"{noun}s"
