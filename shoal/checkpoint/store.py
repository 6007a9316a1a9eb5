"""Saving and loading the state of training: torch's distributed checkpoint (DCP) plans, so that any plan reads any plan's.

Everything saved is a tensor under a name that no plan changes: `model.<parameter>`, `buffer.<name>`,
`optimizer.<parameter>.<kind>`, `loss_scale.<kind>`. Random state needs no place: every random number is a function of
names and of the step.

[Note: one verdict on a checkpoint] Each rank checks what it reads as it reads it, and what none needed is then shared out and
checked too. What any rank found is told to all at a barrier, so that all of them take the checkpoint or none does.
"""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from shoal.checkpoint.folder import (
    COMMIT,
    Checkpoint,
    CheckpointError,
    DamagedCheckpointError,
    Refused,
    inspect,
    list_checkpoints,
    set_aside,
    start,
)
from shoal.checkpoint.layout import Damage, DamagedError, Origin, data_files, read_index
from shoal.checkpoint.parts import Contents, give_up, seal
from shoal.checkpoint.read import Reader, all_blocks, check_blocks
from shoal.checkpoint.write import Recorder, Writer, not_a_tensor
from shoal.parallel.replicate import core
from shoal.parallel.shard import reshard
from shoal.world import DeadlineError, World, WorldError

MOST_THREADS = 8  # that read files of one rank; half as many write one
MOST_TOLD = 4  # damaged places that a message names


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied parameters once."""
    model = core(model)
    reshard(model)
    parameters = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}


def transient_buffers(model: nn.Module) -> list[str]:
    """Names of buffers that a checkpoint holds, and that the model would keep out of its `state_dict`."""
    return [
        f"buffer.{path}.{name}" if path else f"buffer.{name}"
        for path, module in core(model).named_modules()
        for name in sorted(module._non_persistent_buffers_set)
    ]


def save(
    folder: Path,
    step: int,
    state: dict[str, Tensor],
    facts: dict[str, Any],
    world: World,
    *,
    keep: int,
    refused: Callable[[], str] = lambda: "",
) -> Path:
    """Write a checkpoint and prune older ones. Collective; returns its folder on every rank.

    Args:
        step: optimizer steps that are in the state.
        facts: written into the manifest: the job, the plan.
        refused: asked on rank 0, before anything is written and before it counts: why it must not be, or nothing.

    Raises:
        CheckpointError: on every rank, when any could not write, or holds something that is no tensor, or it was refused. Earlier
            checkpoints are untouched.
    """
    _agree(
        world,
        "save a checkpoint",
        not_a_tensor(state) or (world.is_main and refused()) or "",
        CheckpointError,
    )
    aside, save_id = _start(folder, step, world)
    threads = max(1, _threads(world) // 2)  # each keeps a core busy with checksums
    writer = Writer(aside, Origin(save_id, step, world.rank, world.size), threads)
    problem = ""
    try:
        with alone_is_fine():
            dcp.save(state, storage_writer=writer, planner=_save_planner(), no_dist=world.size == 1)
    except CheckpointException as error:  # derives from BaseException
        problem = _cause(error)
    except OSError as error:
        problem = str(error)
    if world.is_main and (problem := problem or refused()):
        problem = give_up(aside, problem, writer.needed_bytes)
    elif world.is_main:
        contents = Contents(facts | {"torch": torch.__version__}, writer.tensors)
        problem = seal(aside, writer.origin, contents, writer.index_sha256, keep)
    if problem := world.broadcast_text(problem if world.is_main else None):
        raise CheckpointError(problem)
    return aside.with_suffix("")


def _start(folder: Path, step: int, world: World) -> tuple[Path, str]:
    """A fresh folder and the save's random id, made by rank 0 and told to all."""
    told = None
    if world.is_main:
        try:
            told = json.dumps([str(start(folder, step)), secrets.token_hex(16), ""])
        except OSError as error:
            told = json.dumps([str(folder), "", str(error)])
    path, save_id, problem = json.loads(world.broadcast_text(told))
    if problem:
        raise CheckpointError(f"no checkpoint can be written into {path}: {problem}")
    return Path(path), save_id


def plan_save(
    state: dict[str, Tensor], world: World
) -> tuple[Recorder, Callable[[dict[str, Tensor]], list[Tensor]]]:
    """What each rank is to write of a state, and what finds this rank's part in the same state of any step. Collective.

    Raises:
        CheckpointError: on every rank, when any holds something that is no tensor.
    """
    _agree(world, "save a checkpoint", not_a_tensor(state), CheckpointError)
    recorder, planner = Recorder(), _save_planner()
    try:
        with alone_is_fine():
            dcp.save(state, storage_writer=recorder, planner=planner, no_dist=world.size == 1)
    except CheckpointException as error:  # derives from BaseException
        raise CheckpointError(f"the save cannot be planned: {_cause(error)}") from None

    def resolve(state: dict[str, Tensor]) -> list[Tensor]:
        planner.set_up_planner(state, is_coordinator=world.is_main)
        found = [planner.resolve_data(item) for item in recorder.items]
        return [data.detach() for data in found if isinstance(data, Tensor)]

    return recorder, resolve


def _save_planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def newest(folder: Path, world: World) -> tuple[Checkpoint | None, list[Refused]]:
    """The newest complete checkpoint, as rank 0 sees it, and what it refused. Collective; tensors are not read."""
    paths, refused = _candidates(folder, world)
    return (_seen_by_all(paths[0], world) if paths else None), refused


def load_newest(
    folder: Path,
    state: Callable[[], dict[str, Tensor]],
    world: World,
    *,
    accept: Callable[[Checkpoint], None],
    among: Callable[[Checkpoint], bool] = lambda checkpoint: True,
) -> tuple[Checkpoint | None, list[Refused]]:
    """Load the newest checkpoint whose every byte is as it was written; None if there never was a checkpoint. Collective.

    Those that are not are refused, by all ranks, and renamed to `<name>.damaged` once an older one is loaded.

    Args:
        state: asked once, for the tensors to read into.
        accept: raises, on all ranks alike, what speaks against a checkpoint of which only the manifest is read.
        among: which checkpoints come into question, as rank 0 sees them; left out, all.

    Raises:
        CheckpointError: there are checkpoints and none can be read.
    """
    paths, refused = _candidates(folder, world, among)
    damaged: list[Path] = []
    tensors: dict[str, Tensor] | None = None
    for path in paths:
        checkpoint = _seen_by_all(path, world)
        accept(checkpoint)
        tensors = state() if tensors is None else tensors
        try:
            load(checkpoint, tensors, world, rest=True)
        except DamagedCheckpointError as error:
            damaged.append(path)
            refused.append(Refused(path, str(error)))
            continue
        for bad in damaged if world.is_main else []:
            set_aside(bad)
        return checkpoint, refused
    if once := [entry for entry in refused if entry.was_complete]:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read: "
            + "; ".join(f"{entry.path.name}: {entry.reason}" for entry in once)
            + "; run.resume=false begins anew and keeps them"
        )
    return None, refused


def _candidates(
    folder: Path, world: World, among: Callable[[Checkpoint], bool] = lambda checkpoint: True
) -> tuple[list[Path], list[Refused]]:
    """Complete checkpoints as rank 0 sees them, newest first, and what it refused."""
    answer = None
    if world.is_main:
        good, refused = list_checkpoints(folder)
        good = list(filter(among, good))
        answer = json.dumps(
            [[str(c.path) for c in reversed(good)], [(str(r.path), r.reason) for r in refused]]
        )
    paths, entries = json.loads(world.broadcast_text(answer))
    return [Path(path) for path in paths], [Refused(Path(where), reason) for where, reason in entries]


def _seen_by_all(path: Path, world: World) -> Checkpoint:
    """A checkpoint, if all ranks see the same one."""
    found = inspect(path)
    seal = "" if isinstance(found, Refused) else (path / COMMIT).read_text()
    first = world.broadcast_text(seal if world.is_main else None)
    if isinstance(found, Refused) or seal != first:
        reason = found.reason if isinstance(found, Refused) else "another one of that name"
        world.barrier(
            f"see {path}",
            f"rank {world.rank} does not see the checkpoint that rank 0 sees: {path}: {reason}; "
            "all ranks need the same run.dir on a shared file system",
        )
    world.barrier(f"see {path}")
    assert isinstance(found, Checkpoint)
    return found


def load(checkpoint: Checkpoint, state: dict[str, Tensor], world: World, *, rest: bool = False) -> None:
    """Read a checkpoint into the tensors of `state`, in place, whatever plan it was written under. Collective.

    What is read is checked. After an error the tensors may hold parts of the checkpoint.

    Args:
        rest: also check what no rank has read.

    Raises:
        CheckpointError: on all ranks, naming a tensor that is missing or has another shape.
        DamagedCheckpointError: on all ranks, naming the files and tensors that are not as they were written.
    """
    _agree(world, "fit the checkpoint", "; ".join(_misfits(checkpoint, state)), CheckpointError)
    reader, damage, failure = _read(checkpoint, state, world)
    _agree(world, "load the checkpoint", failure, CheckpointError)
    _agree(world, "read the checkpoint", _of(checkpoint, damage), DamagedCheckpointError)
    if rest and reader is not None:
        damage = told(_check_unread(reader, world))
        _agree(world, "check the checkpoint", _of(checkpoint, damage), DamagedCheckpointError)


def _read(checkpoint: Checkpoint, state: dict[str, Tensor], world: World) -> tuple[Reader | None, str, str]:
    """Fill `state`; returns what read it, what is damaged, and what else went wrong. No collective."""
    try:
        reader = Reader(checkpoint, read_index(checkpoint), threads=_threads(world))
        with alone_is_fine():
            dcp.load(state, storage_reader=reader, planner=_load_planner(), no_dist=True)
    except (OSError, DamagedError) as error:
        return None, str(error), ""
    except CheckpointException as error:  # derives from BaseException
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        return None, "", f"checkpoint {checkpoint.path} cannot be loaded: rank {world.rank}: {causes}"
    return reader, told(reader.damage), ""


def _load_planner() -> dcp.DefaultLoadPlanner:
    return dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _check_unread(reader: Reader, world: World) -> list[Damage]:
    """Check this rank's share of the blocks that no rank has read, and of the files' headers."""
    blocks = all_blocks(reader.index)
    seen = torch.tensor([block in reader.seen for block in blocks], dtype=torch.uint8, device=world.device)
    if world.size > 1 and blocks:
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    unread = [block for block, was in zip(blocks, seen.tolist(), strict=True) if not was]
    share = slice(world.rank, None, world.size)
    return check_blocks(reader.checkpoint, unread[share], data_files(reader.checkpoint)[share])


def _threads(world: World) -> int:
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // max(1, world.local_size)))


def told(damage: list[Damage]) -> str:
    """Damage in words, the first few places by name."""
    more = f"; and {len(damage) - MOST_TOLD} more places" if len(damage) > MOST_TOLD else ""
    return "; ".join(entry.describe() for entry in damage[:MOST_TOLD]) + more


def _of(checkpoint: Checkpoint, problem: str) -> str:
    return f"checkpoint {checkpoint.path} is damaged: {problem}" if problem else ""


def _agree(world: World, what: str, problem: str, kind: type[CheckpointError]) -> None:
    """Raise on all ranks what any has to say."""
    try:
        world.barrier(what, problem)
    except DeadlineError:
        raise
    except WorldError as error:
        raise kind(str(error)) from None


def _misfits(checkpoint: Checkpoint, state: dict[str, Tensor]) -> Iterator[str]:
    """The first tensor that the checkpoint cannot fill."""
    written = checkpoint.manifest["tensors"]
    for name, tensor in state.items():
        if name not in written:
            yield (
                f"checkpoint {checkpoint.path} has no {name!r}: it is of another model or optimizer; "
                "choose another run.dir"
            )
            return
        if written[name]["shape"] != list(tensor.shape):
            yield (
                f"checkpoint {checkpoint.path}: {name!r} has shape {written[name]['shape']}, the model has "
                f"{list(tensor.shape)}; the job was changed, choose another run.dir"
            )
            return


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """Without DCP's warning that a process saves or loads by itself; ranks agree on what they loaded by other means."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: CheckpointException) -> str:
    """The failures by rank, which the exception's message leaves out."""
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in sorted(failures.items())
    )
