"""`begin_with`: the first checkpoint of a run, made of tensors that something else wrote."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint.deepspeed import Taken, deepspeed_folder, read_deepspeed
from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import read_plain
from shoal.checkpoint.store import save
from shoal.config import Settings
from shoal.launch.ready import with_data
from shoal.observe.status import RankStatus
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.run import Run
from shoal.train.setup import facts_of, set_up
from shoal.world import join_world


class Begun(NamedTuple):
    """What was taken over."""

    path: Path
    step: int
    tensors: int
    with_optimizer: bool


def begin_with(
    source: Path,
    settings: Settings,
    *,
    step: int | None = None,
    trust: bool = False,
    weights_only: bool = False,
) -> Begun:
    """Write a checkpoint of a job's model with the tensors of `source`, in this process and on the CPU.

    Args:
        step: optimizer steps that count as done; left out, those that `source` tells of, or none.
        trust: see `read_plain`.
        weights_only: leave the optimizer's state in `source` out.

    Raises:
        ValueError: the run has checkpoints already, `source` cannot be read or needs trust, or its names or shapes are not the
            model's; names them.
    """
    run = Run(Path(settings.run.dir))
    if list_checkpoints(run.checkpoints)[0]:
        raise ValueError(f"{str(run.path)!r} has checkpoints already; choose another run.dir")
    found = _read(source, trust=trust, weights_only=weights_only)
    step = found.step if step is None else step
    run.create()
    settings = with_data(settings).with_plan(Plan(compile=False))
    with join_world(rank=0, size=1, device="cpu") as here, torch.no_grad():
        training = set_up(settings, here, run, RankStatus(None, 0))
        state = training.state()
        taken = _matched(found.tensors, state, training.model)
        for name, tensor in taken.items():
            state[name].copy_(tensor)
        path = save(run.checkpoints, step, state, facts_of(training), here, keep=settings.checkpoint.keep)
        training.metrics.close()
    return Begun(path, step, len(taken), any(name.startswith("optimizer.") for name in taken))


def _read(source: Path, *, trust: bool, weights_only: bool) -> Taken:
    if folder := deepspeed_folder(source):
        return read_deepspeed(folder, weights_only=weights_only)
    found = read_plain(source, trust=trust)
    if weights_only:
        found = {name: tensor for name, tensor in found.items() if not name.startswith("optimizer.")}
    return Taken(found, 0)


def _matched(found: dict[str, Tensor], state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors under the names of the state: each of the model's, and all of the optimizer's or none.

    Raises:
        ValueError: naming what is missing, what is too much, and what has another shape.
    """
    taken: dict[str, Tensor] = {}
    strange: list[str] = []
    names = {name for name, _ in core(model).named_parameters(remove_duplicate=False)}
    second_names = names - {name for name, _ in core(model).named_parameters()}  # of tied ones
    for name, tensor in found.items():
        ours = next((n for n in (name, f"model.{name}", f"buffer.{name}") if n in state), None)
        if ours is not None:
            taken[ours] = tensor
        elif not {name, _parameter(name)} & second_names:  # which are none too many
            strange.append(name)
    whole = any(name.startswith("optimizer.") for name in taken)
    missing = [
        name
        for name in state
        if name not in taken and (name.startswith("model.") or (whole and name.startswith("optimizer.")))
    ]
    other = [
        f"{name} has shape {list(tensor.shape)}, the model's has {list(state[name].shape)}"
        for name, tensor in taken.items()
        if tensor.shape != state[name].shape
    ]
    problems = [f"missing are {_few(missing)}"] * bool(missing) + [f"of no use are {_few(strange)}"] * bool(
        strange
    )
    if problems := [*problems, *other[:4]]:
        raise ValueError(f"the tensors are not those of the job's model: {'; '.join(problems)}")
    return taken


def _parameter(name: str) -> str:
    """Of which parameter a tensor is, or the state."""
    if name.startswith("optimizer."):
        return name.removeprefix("optimizer.").rpartition(".")[0]
    return name.removeprefix("model.")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
