"""Whole weights in fp32 and optimizer state out of a DeepSpeed checkpoint folder, of ZeRO stages 1, 2 and 3.

[Note: how ZeRO cuts] Stages 1 and 2 lay the parameters of a group of the optimizer end to end, in the order of `param_shapes`,
and cut that line into as many equal parts as there are ranks. Padding fills up its end; it may be left out of the weights and not
of the optimizer's state. Stage 3 cuts each parameter by itself: rank r has its elements r * n to (r + 1) * n, where n is its size
divided by the ranks and rounded up, and lays these pieces end to end in sub-groups, at whose borders no parameter is cut. State
of the optimizer lies as the weights lie that it belongs to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint.unpickle import Inert, load_inert

LATEST = "latest"
OF_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?zero_pp_rank_)(\d+)_mp_rank_(\d+)_optim_states\.pt")
OF_EXPERTS = re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|expp_rank_\d+_.*\.pt")
LINES, PIECES = "single_partition_of_fp32_groups", "fp32_flat_groups"  # of stages 1 and 2; of stage 3


class Taken(NamedTuple):
    """Whole tensors: weights and buffers by name, state as `optimizer.<weight>.<kind>`; and how many steps were done."""

    tensors: dict[str, Tensor]
    step: int


class Shard(NamedTuple):
    """A rank's file, and what the optimizer saved in it."""

    path: Path
    saved: dict[str, Any]


class Share(NamedTuple):
    """What a rank has of a group: flat weights, flat state by kind, and how many steps the optimizer counted, if it does."""

    path: Path
    weights: Tensor
    state: dict[str, Tensor]
    step: float | None


class Cut(NamedTuple):
    """Where a parameter lies in the shares of its group: in this order a rank, its first element and how many."""

    shape: tuple[int, ...]
    group: int
    places: list[tuple[int, int, int]]


Group = Sequence[Share]
"""a share a rank"""


def deepspeed_folder(source: Path) -> Path | None:
    """The folder of a step that `source` is, or that its file `latest` names; None if it is nothing of the kind.

    Raises:
        ValueError: the folder that `latest` names is not there.
    """
    if not source.is_dir():
        return None
    if any(OF_OPTIMIZER.fullmatch(path.name) for path in source.iterdir()):
        return source
    if not (source / LATEST).is_file():
        return None
    tag = (source / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    if not tag or not (source / tag).is_dir():
        raise ValueError(f"{str(source / LATEST)!r} names {tag!r}, and there is no such folder")
    return source / tag


def read_deepspeed(folder: Path, *, weights_only: bool = False) -> Taken:
    """What was trained, put together from the files of all ranks. No code of their writer runs.

    Raises:
        ValueError: a file is missing, too many, cut off, of another step or number of ranks, or holds something else; names it.
            Or the model was cut in a way that is not read: into tensor, pipeline or expert parallel parts.
    """
    shards = _shards(folder)
    stage = _stage(shards)
    paths = _model_files(shards, stage)
    models = [_model(path) for path in paths]
    _require_equal("global_steps", paths, [model.get("global_steps") for model in models])
    groups = _groups(shards, stage, state=not weights_only)
    cuts = _cuts_of_pieces(models[0], groups) if stage == 3 else _cuts_of_lines(models[0], groups, shards[0])
    tensors = _buffers(models[0]) | _frozen(paths, models, stage)
    tensors |= {
        name: _whole(cut, [share.weights for share in groups[cut.group]]) for name, cut in cuts.items()
    }
    tensors |= dict(_states(cuts, groups))
    return Taken(_with_second_names(tensors, models[0]), int(models[0].get("global_steps") or 0))


def _shards(folder: Path) -> list[Shard]:
    """What the optimizer saved by rank, each rank's there once."""
    paths = _optimizer_files(folder)
    shards = {rank: _shard(path) for rank, path in sorted(paths.items())}
    first = next(iter(shards.values()))
    count = _count(first)
    for rank in range(count):
        if rank not in shards:
            name = OF_OPTIMIZER.sub(rf"\g<1>{rank}_mp_rank_00_optim_states.pt", first.path.name)
            raise ValueError(f"{str(folder / name)!r} is missing: {count} ranks saved")
    for rank, shard in shards.items():
        if rank >= count or _count(shard) != count:
            raise ValueError(
                f"{str(shard.path)!r} is of {_count(shard)} ranks, and {first.path.name} is of {count}: "
                "the folder holds two saves"
            )
    return list(shards.values())


def _optimizer_files(folder: Path) -> dict[int, Path]:
    """The optimizer's files by rank, of a model that is cut over data parallel ranks alone."""
    names = sorted(path.name for path in folder.iterdir())
    if experts := [name for name in names if OF_EXPERTS.fullmatch(name)]:
        raise ValueError(f"{str(folder / experts[0])!r} holds experts of a mixture, which are not read")
    found = [match for name in names if (match := OF_OPTIMIZER.fullmatch(name))]
    if not found:
        raise ValueError(
            f"{str(folder)!r} has no file ..._optim_states.pt, as stages 1, 2 and 3 of ZeRO write one a rank"
        )
    if other := [match for match in found if int(match[3])]:
        raise ValueError(
            f"{str(folder / other[0][0])!r} is of a model that is cut into tensor or pipeline parallel parts, which are not read"
        )
    if len({match[1] for match in found}) > 1:
        raise ValueError(f"{str(folder)!r} holds files of two saves: {found[0][0]} and {found[-1][0]}")
    return {int(match[2]): folder / match[0] for match in found}


def _shard(path: Path) -> Shard:
    held = load_inert(path)
    saved = held.get("optimizer_state_dict") if isinstance(held, dict) else None
    if (
        not isinstance(saved, dict)
        or not (LINES in saved or PIECES in saved)
        or "partition_count" not in saved
    ):
        raise ValueError(f"{str(path)!r} holds something else than what an optimizer of ZeRO saves")
    return Shard(path, saved)


def _count(shard: Shard) -> int:
    """How many ranks saved, as one of them says."""
    counts = shard.saved["partition_count"]
    counts = set(counts) if isinstance(counts, list) else {counts}
    if len(counts) != 1:
        raise ValueError(
            f"{str(shard.path)!r} has groups over {sorted(counts)} ranks, as experts have, which is not read"
        )
    return int(counts.pop())


def _stage(shards: list[Shard]) -> int:
    stages = [_stage_of(shard) for shard in shards]
    _require_equal("ZeRO stage", [shard.path for shard in shards], stages)
    if (stages[0] == 3) != (PIECES in shards[0].saved):
        raise ValueError(
            f"{str(shards[0].path)!r} says that it is of ZeRO stage {stages[0]}, and holds another's"
        )
    return stages[0]


def _stage_of(shard: Shard) -> int:
    stage = shard.saved.get(
        "zero_stage", 3 if PIECES in shard.saved else 1
    )  # the one for bf16 does not say it
    number = stage.args[0] if isinstance(stage, Inert) and len(stage.args) == 1 else stage
    if number not in (1, 2, 3):
        raise ValueError(f"{str(shard.path)!r} is of no ZeRO stage that is known: {number!r}")
    return int(number)


def _model_files(shards: list[Shard], stage: int) -> list[Path]:
    folder = shards[0].path.parent
    if stage < 3:
        return [folder / "mp_rank_00_model_states.pt"]
    return [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(shards))]


def _model(path: Path) -> dict[str, Any]:
    held = load_inert(path)
    if not isinstance(held, dict) or not isinstance(held.get("param_shapes"), list):
        raise ValueError(f"{str(path)!r} does not say which parameters the optimizer has")
    return held


def _require_equal(what: str, paths: Sequence[Path], values: Sequence[Any]) -> None:
    for path, value in zip(paths, values, strict=True):
        if value != values[0]:
            raise ValueError(f"{str(path)!r} is of {what} {value}, and {paths[0].name} of {values[0]}")


def _groups(shards: list[Shard], stage: int, *, state: bool) -> list[Group]:
    """For each group (of stage 3: sub-group) what each rank has of it."""
    parts = [shard.saved[PIECES if stage == 3 else LINES] for shard in shards]
    _require_equal("number of groups", [shard.path for shard in shards], [len(part) for part in parts])
    groups: list[Group] = [
        [
            _share(shard, part[number], _state_of(shard.saved, stage, number) if state else {})
            for shard, part in zip(shards, parts, strict=True)
        ]
        for number in range(len(parts[0]))
    ]
    for group in groups:
        paths = [share.path for share in group]
        _require_equal(
            "optimizer state", paths, [", ".join(sorted(share.state)) or "none" for share in group]
        )
        _require_equal("optimizer step", paths, [share.step for share in group])
    return groups


def _share(shard: Shard, weights: Any, state: Mapping[str, Any]) -> Share:
    if not isinstance(weights, Tensor) or weights.dim() != 1:
        raise ValueError(f"{str(shard.path)!r} holds something else than flat weights")
    flat = {kind: value for kind, value in state.items() if isinstance(value, Tensor) and value.dim()}
    for kind, value in flat.items():
        if value.dim() != 1 or len(value) < len(weights):
            raise ValueError(
                f"{str(shard.path)!r} has {kind} of shape {list(value.shape)} for {len(weights):,} weights; its weights alone "
                "can be taken: --weights"
            )
    step = state.get("step")
    return Share(shard.path, weights, flat, None if step is None else float(step))


def _state_of(saved: dict[str, Any], stage: int, number: int) -> dict[str, Any]:
    """What the optimizer remembers of a group, which is one flat parameter to it."""
    base = saved.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, list):  # of elastic checkpoints
        return {"step": saved.get("base_optimizer_state_step"), **base[number]}
    if not isinstance(base, dict):
        return {}
    own = next((group for group in base.get("param_groups", []) if number in group["params"]), {})
    state = base.get("state", {}).get(number, {})
    return {"step": own.get("step"), **state} if state else {}  # some optimizers count in the group


def _cuts_of_lines(model: dict[str, Any], groups: Sequence[Group], first: Shard) -> dict[str, Cut]:
    """Where stages 1 and 2 put each parameter."""
    shapes, paddings = model["param_shapes"], first.saved.get("param_alignment_paddings")
    if len(shapes) != len(groups):
        raise ValueError(
            f"{str(first.path)!r} has {len(groups)} groups, and the model's file has {len(shapes)}"
        )
    cuts: dict[str, Cut] = {}
    for number, (group, named) in enumerate(zip(groups, shapes, strict=True)):
        bounds = [0, *accumulate(len(share.weights) for share in group)]
        at = 0
        after = paddings[number] if paddings else [0] * len(named)
        for (name, shape), padding in zip(named.items(), after, strict=True):
            size = math.prod(shape)
            cuts[name] = Cut(tuple(shape), number, list(_places(bounds, at, at + size)))
            at += size + padding
        # a line is filled up to a multiple of twice the ranks
        if not 0 <= bounds[-1] - at < 2 * len(group):
            raise _unequal(group, bounds[-1], at)
    return cuts


def _places(bounds: list[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Where elements `start` to `stop` of a line are that is cut at `bounds`."""
    for rank, (low, high) in enumerate(pairwise(bounds)):
        if (first := max(start, low)) < (last := min(stop, high)):
            yield rank, first - low, last - first


def _cuts_of_pieces(model: dict[str, Any], groups: Sequence[Group]) -> dict[str, Cut]:
    """Where stage 3 put each parameter."""
    cuts: dict[str, Cut] = {}
    shapes = {name: shape for named in model["param_shapes"] for name, shape in named.items()}
    for group in groups:
        sizes = [f"{len(share.weights):,} weights" for share in group]
        _require_equal("a group with", [share.path for share in group], sizes)
    number, at = 0, 0
    for name, shape in shapes.items():
        while number < len(groups) and at == len(groups[number][0].weights):
            number, at = number + 1, 0
        size = math.prod(shape)
        each = -(-size // len(groups[0]))
        if number == len(groups) or at + each > len(groups[number][0].weights):
            group = groups[min(number, len(groups) - 1)]
            raise _unequal(group, len(group[0].weights), at + each)
        places = [(rank, at, min(each, size - rank * each)) for rank in range(len(groups[0]))]
        cuts[name] = Cut(tuple(shape), number, [place for place in places if place[2] > 0])
        at += each
    if sum(len(group[0].weights) for group in groups[number:]) != at:
        raise _unequal(groups[-1], len(groups[-1][0].weights), at if number == len(groups) - 1 else 0)
    return cuts


def _unequal(group: Group, have: int, need: int) -> ValueError:
    paths = f"{str(group[0].path)!r}" + (f" to {group[-1].path.name}" if len(group) > 1 else "")
    return ValueError(
        f"{paths}: a group has {have:,} weights, and its parameters {need:,}; the files are not of one save"
    )


def _whole(cut: Cut, flat: Sequence[Tensor]) -> Tensor:
    parts = [flat[rank][at : at + size] for rank, at, size in cut.places]
    return (parts[0] if len(parts) == 1 else torch.cat([*parts, flat[0][:0]])).view(cut.shape)


def _states(cuts: dict[str, Cut], groups: Sequence[Group]) -> Iterator[tuple[str, Tensor]]:
    for name, cut in cuts.items():
        group = groups[cut.group]
        for kind in group[0].state:
            yield f"optimizer.{name}.{kind}", _whole(cut, [share.state[kind] for share in group])
        if group[0].step is not None:
            yield f"optimizer.{name}.step", torch.tensor(group[0].step)


def _buffers(model: dict[str, Any]) -> dict[str, Tensor]:
    module = model.get("module") or {}  # of a pipeline's model it is elsewhere
    return {name: module[name] for name in model.get("buffer_names") or () if name in module}


def _frozen(paths: list[Path], models: list[dict[str, Any]], stage: int) -> dict[str, Tensor]:
    """Parameters that were not trained, in the type they had."""
    shapes = models[0].get("frozen_param_shapes") or {}
    parts = [model.get("frozen_param_fragments") or {} for model in models]
    for path, part in zip(paths, parts, strict=True):
        if missing := [name for name in shapes if name not in part]:
            raise ValueError(f"{str(path)!r} does not hold {missing[0]}, which was not trained")
    frozen = {}
    for name, shape in shapes.items():
        line = torch.cat([part[name].flatten() for part in parts]) if stage == 3 else parts[0][name].flatten()
        frozen[name] = line[: math.prod(shape)].view(shape)
    return frozen


def _with_second_names(tensors: dict[str, Tensor], model: dict[str, Any]) -> dict[str, Tensor]:
    """Tied parameters under all their names: the job's model may call another one the first."""
    found = dict(tensors)
    for second, first in (model.get("shared_params") or {}).items():
        for name, tensor in tensors.items():
            if name == first:
                found[second] = tensor
            elif name.startswith(f"optimizer.{first}."):
                found[f"optimizer.{second}.{name.removeprefix(f'optimizer.{first}.')}"] = tensor
    return found
