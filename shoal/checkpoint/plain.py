"""Whole tensors out of a checkpoint, for anything that is not Shoal, and out of what others wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shoal.checkpoint.folder import Checkpoint, DamagedCheckpointError
from shoal.checkpoint.layout import DamagedError, Index, Stored, read_index
from shoal.checkpoint.read import Files, read_box
from shoal.checkpoint.store import alone_is_fine, told
from shoal.checkpoint.unpickle import why_unread
from shoal.data.text import import_extra
from shoal.models.huggingface.weights import INDEX, SINGLE
from shoal.run import write_whole

SHARD_BYTES = 5 * 2**30
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


def whole_tensors(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors as they were before they were spread, one after the other, each checked.

    Raises:
        DamagedCheckpointError: naming the file and the tensor.
    """
    index = index_of(checkpoint)
    with Files(checkpoint) as files:
        for name in index if names is None else names:
            yield name, read_whole(checkpoint, files, name, index[name])


def index_of(checkpoint: Checkpoint) -> Index:
    """Where its tensors lie.

    Raises:
        DamagedCheckpointError: that cannot be told.
    """
    try:
        return read_index(checkpoint)
    except (OSError, DamagedError) as error:
        raise DamagedCheckpointError(f"checkpoint {checkpoint.path} is damaged: {error}") from error


def read_whole(checkpoint: Checkpoint, files: Files, name: str, stored: Stored) -> Tensor:
    """A tensor as it was before it was spread.

    Raises:
        DamagedCheckpointError: naming the file and the tensor.
    """
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for piece in stored.pieces:
        origin = (0,) * len(piece.sizes)
        _, part, bad = read_box(files, name, piece, stored.dtype, origin, piece.sizes)
        if bad:
            raise DamagedCheckpointError(f"checkpoint {checkpoint.path} is damaged: {told(bad)}")
        box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
        whole[box] = part
    return whole


def export_plain(checkpoint: Checkpoint, out: Path, *, weights: bool, shard_bytes: int = SHARD_BYTES) -> int:
    """Write whole tensors into a file for `torch.load`, or a folder of safetensors files; returns how many tensors.

    Args:
        out: a file that ends in .pt, .pth, .bin or .ckpt, or a folder, which is new or empty.
        weights: only parameters and buffers, under their names in the model; those alone that are in its `state_dict`.

    Raises:
        ValueError: `out` is there, or safetensors is not installed.
        DamagedCheckpointError: the checkpoint is not what was written.
    """
    left_out = set(checkpoint.manifest.get("transient", ())) if weights else set()
    names = [name for name in checkpoint.manifest["tensors"] if name not in left_out]
    renamed = {name: _model_name(name) if weights else name for name in names}
    wanted = {name: new for name, new in renamed.items() if new is not None}
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{str(out)!r} is there already; choose another name")
    if out.suffix in TORCH_FILES:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = out.with_name(f".{out.name}.tmp")
        torch.save({wanted[name]: tensor for name, tensor in whole_tensors(checkpoint, wanted)}, aside)
        aside.replace(out)
    else:
        _write_safetensors(checkpoint, out, wanted, shard_bytes)
    return len(wanted)


def _model_name(name: str) -> str | None:
    kind, _, rest = name.partition(".")
    return rest if kind in ("model", "buffer") else None


def _write_safetensors(
    checkpoint: Checkpoint, out: Path, wanted: dict[str, str | None], shard_bytes: int
) -> None:
    """One file, or several and an index, as Hugging Face names them. No more than one file's tensors are held."""
    save_file = import_extra("safetensors.torch", "writing safetensors files").save_file
    index = index_of(checkpoint)
    shards: list[list[str]] = [[]]
    held = 0
    for name in wanted:
        size = math.prod(index[name].shape) * index[name].dtype.itemsize
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    out.mkdir(parents=True, exist_ok=True)
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    )
    for file, names in zip(files, shards, strict=True):
        save_file({wanted[name]: tensor for name, tensor in whole_tensors(checkpoint, names)}, out / file)
    if len(files) > 1:
        places = {wanted[name]: file for file, names in zip(files, shards, strict=True) for name in names}
        write_whole(out / INDEX, json.dumps({"metadata": {}, "weight_map": places}, indent=1))


def read_plain(source: Path, *, trust: bool) -> dict[str, Tensor]:
    """Tensors by name from a torch file, safetensors files, or a folder of torch's distributed checkpoint (DCP).

    Args:
        trust: allow a DCP folder, whose `.metadata` is a pickle and can run any code when it is read.

    Raises:
        ValueError: there is nothing of the kind, it holds something else than tensors, or it needs trust.
    """
    if source.is_dir() and (source / ".metadata").exists():
        return _read_dcp(source, trust)
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if files and all(file.suffix == ".safetensors" for file in files):
        load_file = import_extra("safetensors.torch", "reading safetensors files").load_file
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    if source.is_file():
        return _read_torch(source)
    raise ValueError(
        f"{str(source)!r} is no torch file, no safetensors file, no folder of them and no distributed checkpoint"
    )


def _read_torch(source: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds: not a zip file, a pickle of more than tensors
        raise ValueError(f"{str(source)!r} cannot be read as tensors: {why_unread(error)}") from error
    for key in ("state_dict", "model"):  # where others put the weights
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{str(source)!r} holds something else than a dict of tensors")
    return found


def _read_dcp(source: Path, trust: bool) -> dict[str, Tensor]:
    if not trust:
        raise ValueError(
            f"{str(source)!r} is a distributed checkpoint, whose .metadata is a pickle: reading it can run any code that its "
            "writer chose. If you trust who wrote it and who could change it since: --trust"
        )
    reader = dcp.FileSystemReader(source)
    state: dict[str, Any] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with alone_is_fine():
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state
