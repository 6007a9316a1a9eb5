"""What torch's distributed checkpoint (DCP) writes with: it plans who saves which piece, and this puts the pieces into files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shoal.checkpoint.folder import INDEX
from shoal.checkpoint.layout import BLOCK_BYTES, HEADER_BYTES, Origin, Piece, index_text
from shoal.run import write_whole


class Writer(StorageWriter):
    """Writes this rank's file into a folder and, on the coordinator, `index.json`; the folder is not yet a checkpoint.

    After `dcp.save`, `tensors` and `index_sha256` of the coordinator are for the manifest, and `needed_bytes` says what all
    files take.
    """

    def __init__(self, folder: Path, origin: Origin) -> None:
        self.folder, self.origin = folder, origin
        self.tensors: dict[str, dict[str, Any]] = {}
        self.index_sha256 = ""
        self.needed_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse before anything is written if it will not fit. Some network file systems say 0 of 0 bytes: not known."""
        self.needed_bytes = sum(HEADER_BYTES + sum(map(_item_bytes, plan.items)) for plan in plans)
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < self.needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file: flushed to the disk when this returns."""
        results = []
        with (self.folder / self.origin.file).open("wb") as file:
            file.write(self.origin.header())
            at = HEADER_BYTES
            for item in sorted(plan.items, key=_widest_first):
                piece, size = _write_piece(file, item, planner.resolve_data(item), self.origin.file, at)
                results.append(WriteResult(item.index, size, piece))
                at += size
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of what all ranks wrote."""
        pieces: dict[str, list[Piece]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for by_rank in results for result in by_rank):
            if result.size_in_bytes:  # a rank may hold nothing of a tensor that does not divide
                pieces[result.index.fqn].append(result.storage_data)
        text = index_text(pieces)
        write_whole(self.folder / INDEX, text)
        self.index_sha256 = hashlib.sha256(text.encode()).hexdigest()
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            self.tensors[name] = {"shape": list(stored.size), "dtype": dtype}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


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


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _widest_first(item: WriteItem) -> tuple[int, str, tuple[int, ...]]:
    """So that each element lies at a multiple of its size with nothing between."""
    assert item.tensor_data is not None
    return -item.tensor_data.properties.dtype.itemsize, item.index.fqn, tuple(item.index.offset or ())


def _write_piece(file: BinaryIO, item: WriteItem, data: Any, name: str, at: int) -> tuple[Piece, int]:
    assert item.tensor_data is not None and isinstance(data, Tensor)
    chunk = item.tensor_data.chunk
    raw = _bytes_of(data)
    blocks = [raw[start : start + BLOCK_BYTES] for start in range(0, len(raw), BLOCK_BYTES)]
    sums = []
    for block in blocks:
        sums.append(zlib.crc32(block))
        file.write(block)
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), name, at, tuple(sums)), len(raw)


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements in C order; a copy only of one that is on a device or not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
