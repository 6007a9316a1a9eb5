"""What torch's distributed checkpoint (DCP) saves with: it plans who saves which piece, and this puts the pieces into files.

`Writer` writes what is planned at once, `Recorder` only keeps the plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shoal.checkpoint.layout import BLOCK_BYTES, HEADER_BYTES, Origin
from shoal.checkpoint.parts import Part, require_room, write_index, write_parts


class Recorder(StorageWriter):
    """Writes nothing.

    After `dcp.save`, `items` are what this rank is to write, in the order of its file; on the coordinator, `needed_bytes` says
    what all files take and `tensors` what is in them, for the manifest.
    """

    def __init__(self) -> None:
        self.items: list[WriteItem] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self.needed_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.needed_bytes = sum(HEADER_BYTES + sum(map(item_bytes, plan.items)) for plan in plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.items = sorted(plan.items, key=_widest_first)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._results(planner))
        return done

    def _results(self, planner: SavePlanner) -> list[WriteResult]:
        return []

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            self.tensors[name] = {"shape": list(stored.size), "dtype": dtype}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


class Writer(Recorder):
    """Writes this rank's file into a folder and, on the coordinator, `index.json`; the folder is not yet a checkpoint.

    After `dcp.save`, `index_sha256` of the coordinator is for the manifest as well.
    """

    def __init__(self, folder: Path, origin: Origin, threads: int = 1) -> None:
        super().__init__()
        self.folder, self.origin, self.threads = folder, origin, threads
        self.index_sha256 = ""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        super().prepare_global_plan(plans)
        require_room(self.folder, self.needed_bytes)
        return plans

    def _results(self, planner: SavePlanner) -> list[WriteResult]:
        parts = (part_of(item, planner.resolve_data(item)) for item in self.items)
        written = write_parts(self.folder, self.origin, parts, self.threads)
        return [
            WriteResult(item.index, item_bytes(item), piece)
            for item, (_, piece) in zip(self.items, written, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        written = ((result.index.fqn, result.storage_data) for by_rank in results for result in by_rank)
        self.index_sha256 = write_index(self.folder, self.tensors, written)


def not_a_tensor(state: dict[str, Tensor]) -> str:
    """What to say of the first entry that is no tensor; empty if all are.

    Only tensors are saved: anything else could only be read back by running code of the file's choice.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            return (
                f"{name!r} is of type {type(value).__name__}, and a checkpoint holds only tensors: wrap it in "
                "torch.tensor(...), or put it into `facts`, which go into the manifest as JSON"
            )
    return ""


def item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _widest_first(item: WriteItem) -> tuple[int, str, tuple[int, ...]]:
    """So that each element lies at a multiple of its size with nothing between."""
    assert item.tensor_data is not None
    return -item.tensor_data.properties.dtype.itemsize, item.index.fqn, tuple(item.index.offset or ())


def part_of(item: WriteItem, data: Any) -> Part:
    """A planned piece with its data; the bytes of a tensor on a device come when they are asked for."""
    assert item.tensor_data is not None and isinstance(data, Tensor)
    chunk = item.tensor_data.chunk
    return Part(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), item_bytes(item), bytes_of(data))


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's elements in C order; a copy only of one that is on a device or not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    for start in range(0, len(raw), BLOCK_BYTES):
        yield raw[start : start + BLOCK_BYTES]
