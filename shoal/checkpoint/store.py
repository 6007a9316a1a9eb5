"""Saving and loading the state of training through torch's distributed checkpoint (DCP), which fits any plan to any plan.

Everything saved is a tensor under a name that no plan changes: `model.<parameter>`, `buffer.<name>`,
`optimizer.<parameter>.<kind>`, `loss_scale.<kind>`. Random state needs no place: every random number is a function of
names and of the step.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from shoal.checkpoint.folder import Checkpoint, Refused, commit, inspect, list_checkpoints, prune, start
from shoal.parallel.replicate import core
from shoal.parallel.shard import reshard
from shoal.version import __version__
from shoal.world import World


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the folder and the cause."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied parameters once."""
    model = core(model)
    reshard(model)
    parameters = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}


def save(
    folder: Path, step: int, state: dict[str, Tensor], facts: dict[str, Any], world: World, *, keep: int
) -> Path:
    """Write a checkpoint and prune older ones. Collective; returns its folder on every rank.

    Args:
        step: optimizer steps that are in the state.
        facts: written into the manifest: the job, the plan.

    Raises:
        CheckpointError: on every rank, when any could not write. Earlier checkpoints are untouched.
    """
    aside = _start(folder, step, world)
    problem = ""
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(aside, single_file_per_rank=True))
    except CheckpointException as error:  # derives from BaseException
        problem = _cause(error)
    except OSError as error:
        problem = str(error)
    if problem:
        free = shutil.disk_usage(folder).free
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)  # else what is half written keeps a full disk full
        raise CheckpointError(
            f"checkpoint {aside} could not be written: {problem}; {free / 2**20:,.0f} MiB were free"
        )
    path = aside.with_suffix("")
    tensors = _describe(state, world)
    if world.is_main:
        problem = _commit_here(aside, step, tensors, facts, keep)
    if problem := world.broadcast_text(problem if world.is_main else None):
        raise CheckpointError(problem)
    return path


def _start(folder: Path, step: int, world: World) -> Path:
    """A fresh folder, made by rank 0 and told to all."""
    told = None
    if world.is_main:
        try:
            told = json.dumps([str(start(folder, step)), ""])
        except OSError as error:
            told = json.dumps([str(folder), str(error)])
    path, problem = json.loads(world.broadcast_text(told))
    if problem:
        raise CheckpointError(f"no checkpoint can be written into {path}: {problem}")
    return Path(path)


def _describe(state: dict[str, Tensor], world: World) -> dict[str, Any]:
    """Shape and type of every tensor that any rank has; ranks of a pipeline have different ones."""
    mine = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in state.items()
    }
    if world.size == 1:
        return mine
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine)
    return {name: tensor for known in everyone for name, tensor in known.items()}


def _commit_here(aside: Path, step: int, tensors: dict[str, Any], facts: dict[str, Any], keep: int) -> str:
    """Commit on rank 0; returns what went wrong, if anything."""
    manifest = {
        "format": 1,
        "step": step,
        "written": round(time.time(), 3),
        "shoal": __version__,
        "torch": torch.__version__,
        **facts,
        "tensors": tensors,
    }
    try:
        commit(aside, manifest)
        prune(aside.parent, keep)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        return f"checkpoint {aside} could not be committed: {error}"
    return ""


def newest(folder: Path, world: World) -> tuple[Checkpoint | None, list[Refused]]:
    """The newest complete checkpoint, as rank 0 sees it, and what it refused. Collective."""
    answer = None
    if world.is_main:
        good, refused = list_checkpoints(folder)
        answer = json.dumps([str(good[-1].path) if good else "", [(str(r.path), r.reason) for r in refused]])
    path, refused = json.loads(world.broadcast_text(answer))
    found = inspect(Path(path)) if path else None
    if isinstance(found, Refused):
        raise CheckpointError(
            f"rank {world.rank} does not see the checkpoint that rank 0 sees: {path}: {found.reason}; "
            "all ranks need the same run.dir on a shared file system"
        )
    return found, [Refused(Path(where), reason) for where, reason in refused]


def load(checkpoint: Checkpoint, state: dict[str, Tensor], world: World) -> None:
    """Read a checkpoint into the tensors of `state`, in place, whatever plan it was written under. Collective.

    Raises:
        CheckpointError: naming the first tensor that is missing or has another shape, or the file that cannot be read.
    """
    _check_fits(checkpoint, state)
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path))
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be read: {_cause(error)}") from error


def _check_fits(checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    written = checkpoint.manifest["tensors"]
    for name, tensor in state.items():
        if name not in written:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} has no {name!r}: it is of another model or optimizer; "
                "choose another run.dir"
            )
        if written[name]["shape"] != list(tensor.shape):
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name!r} has shape {written[name]['shape']}, the model has "
                f"{list(tensor.shape)}; the job was changed, choose another run.dir"
            )


def _cause(error: CheckpointException) -> str:
    """The failures by rank, which the exception's message leaves out."""
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in sorted(failures.items())
    )
