"""What torch's distributed checkpoint (DCP) reads with: parts of files, each checked as it is read. Nothing is unpickled."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shoal.checkpoint.folder import Checkpoint
from shoal.checkpoint.layout import (
    BLOCK_BYTES,
    HEADER_BYTES,
    Damage,
    Index,
    Piece,
    data_files,
    origin_of,
    piece_bytes,
)

PART_BYTES = 32 << 20  # that a thread reads at a time, and has memory for


class Block(NamedTuple):
    """At most 4 MiB of one tensor, with one checksum."""

    file: str
    at: int
    size: int
    crc32: int
    tensor: str


class Files:
    """Data files of a checkpoint, each opened and its header checked when it is first read. For one thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, BinaryIO | Damage] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for file in self._open.values():
            if not isinstance(file, Damage):
                file.close()

    def open(self, name: str) -> BinaryIO | Damage:
        """A file that is of this save, or what is wrong with it."""
        if name not in self._open:
            self._open[name] = self._opened(name)
        return self._open[name]

    def _opened(self, name: str) -> BinaryIO | Damage:
        try:
            file = (self._checkpoint.path / name).open("rb", buffering=0)
            header = file.read(HEADER_BYTES)
        except OSError as error:
            return Damage(name, "", f"cannot be read: {error.strerror}")
        if problem := origin_of(self._checkpoint, name).difference(header):
            file.close()
            return Damage(name, "", problem)
        return file

    def scratch(self, size: int) -> Tensor:
        """Bytes to read into, the same ones each time: fresh memory would cost as much again in page faults."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def read(self, block: Block, into: memoryview) -> Damage | None:
        """Read a block and check it."""
        file = self.open(block.file)
        if isinstance(file, Damage):
            return file._replace(tensor=block.tensor)
        try:
            file.seek(block.at)
            done = 0
            while done < block.size and (count := file.readinto(into[done : block.size])):  # pyrefly: ignore
                done += count
        except OSError as error:
            return Damage(block.file, block.tensor, f"cannot be read at byte {block.at}: {error.strerror}")
        if done < block.size:
            return Damage(block.file, block.tensor, f"the file ends at byte {block.at + done}")
        if zlib.crc32(into[: block.size]) != block.crc32:
            return Damage(
                block.file,
                block.tensor,
                f"bytes {block.at} to {block.at + block.size} are not what was written",
            )
        return None


class Reader(StorageReader):
    """Reads what a load plan asks for, with the whole blocks around it.

    After `dcp.load`, `damage` says what was not as it was written, and `seen` which blocks were read. Damaged parts are left
    out, so that one read finds all of them.
    """

    def __init__(self, checkpoint: Checkpoint, index: Index, threads: int = 1) -> None:
        self.checkpoint, self.index, self.threads = checkpoint, index, threads
        self.damage: list[Damage] = []
        self.seen: set[Block] = set()
        self._pieces = {
            MetadataIndex(name, piece.offsets): piece
            for name, stored in index.items()
            for piece in stored.pieces
        }

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing: a reader is made for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=stored.dtype),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in stored.pieces
                    ],
                )
                for name, stored in self.index.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the index says where everything lies."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, by `threads` side by side: where a plan is as it was, a rank reads one file, its own."""
        shares = self._shares([part for item in plan.items for part in self._cut(item)])
        found: list[Damage] = []
        with ThreadPoolExecutor(self.threads) as pool:
            for damage, seen in pool.map(lambda items: self._read_items(items, planner), shares):
                found += damage
                self.seen |= seen
        self.damage += dict.fromkeys(found)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _cut(self, item: ReadItem) -> Iterator[ReadItem]:
        """An item in parts that are read one at a time, along its first dim that is longer than 1."""
        dim = next((dim for dim, length in enumerate(item.lengths) if length != 1), None)
        if dim is None:
            yield item
            return
        piece = self._pieces[item.storage_index]
        row = math.prod(piece.sizes[dim + 1 :]) * self.index[item.storage_index.fqn].dtype.itemsize
        rows = _rows(row)
        for first in range(0, item.lengths[dim], rows):
            part = replace(
                item,
                dest_offsets=_set(item.dest_offsets, dim, item.dest_offsets[dim] + first),
                storage_offsets=_set(item.storage_offsets, dim, item.storage_offsets[dim] + first),
                lengths=_set(item.lengths, dim, min(rows, item.lengths[dim] - first)),
            )
            yield from self._cut(part) if row > PART_BYTES else (part,)

    def _shares(self, items: list[ReadItem]) -> list[list[ReadItem]]:
        """In the order in which they lie in files, cut into as many shares of about as many bytes as there are threads."""

        def place(item: ReadItem) -> tuple[str, int, tuple[int, ...]]:
            piece = self._pieces[item.storage_index]
            return piece.file, piece.at, tuple(item.storage_offsets)

        shares: list[list[ReadItem]] = [[] for _ in range(self.threads)]
        whole, before = max(1, sum(map(self._bytes_of, items))), 0
        for item in sorted(items, key=place):
            shares[min(self.threads - 1, before * self.threads // whole)].append(item)
            before += self._bytes_of(item)
        return [share for share in shares if share]

    def _bytes_of(self, item: ReadItem) -> int:
        return math.prod(item.lengths) * self.index[item.storage_index.fqn].dtype.itemsize

    def _read_items(self, items: list[ReadItem], planner: LoadPlanner) -> tuple[list[Damage], set[Block]]:
        damage: list[Damage] = []
        seen: set[Block] = set()
        with Files(self.checkpoint) as files:
            for item in items:
                name, piece = item.storage_index.fqn, self._pieces[item.storage_index]
                blocks, part, bad = read_box(
                    files, name, piece, self.index[name].dtype, item.storage_offsets, item.lengths
                )
                seen.update(blocks)
                damage += bad
                if not bad:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        return list(dict.fromkeys(damage)), seen

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).is_dir()


def _rows(row: int) -> int:
    """How many rows of so many bytes in the piece are a part: as many as end with a block, if that many are not too many."""
    most = max(1, PART_BYTES // max(1, row))
    even = BLOCK_BYTES // math.gcd(BLOCK_BYTES, max(1, row))
    return most - most % even if even <= most else most


def _set(numbers: torch.Size, dim: int, value: int) -> torch.Size:
    return torch.Size((*numbers[:dim], value, *numbers[dim + 1 :]))


def read_box(
    files: Files,
    name: str,
    piece: Piece,
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
) -> tuple[list[Block], Tensor, list[Damage]]:
    """A box inside a piece, from the blocks between its first element and its last one; valid until the next read."""
    strides = [math.prod(piece.sizes[dim + 1 :]) for dim in range(len(piece.sizes))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    blocks = list(blocks_of(name, piece, dtype))
    low = first * dtype.itemsize // BLOCK_BYTES
    blocks = blocks[low : ((last + 1) * dtype.itemsize - 1) // BLOCK_BYTES + 1]
    raw = files.scratch(sum(block.size for block in blocks))
    view, at, bad = raw.numpy().data, 0, []
    for block in blocks:
        if (found := files.read(block, view[at : at + block.size])) is not None:
            bad.append(found)
        at += block.size
    part = raw.view(dtype).as_strided(lengths, strides, first - low * BLOCK_BYTES // dtype.itemsize)
    return blocks, part, bad


def blocks_of(name: str, piece: Piece, dtype: torch.dtype) -> Iterator[Block]:
    """The blocks of a piece, in order."""
    size = piece_bytes(piece, dtype)
    for number, crc32 in enumerate(piece.crc32):
        at = number * BLOCK_BYTES
        yield Block(piece.file, piece.at + at, min(BLOCK_BYTES, size - at), crc32, name)


def all_blocks(index: Index) -> list[Block]:
    """Every block of a checkpoint, in the order of files."""
    return sorted(
        block
        for name, stored in index.items()
        for piece in stored.pieces
        for block in blocks_of(name, piece, stored.dtype)
    )


def check_blocks(checkpoint: Checkpoint, blocks: list[Block], names: list[str]) -> list[Damage]:
    """Read blocks, and the headers of files, only to check them."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with Files(checkpoint) as files:
        damage = [found for name in names if isinstance(found := files.open(name), Damage)]
        damage += [found for block in blocks if (found := files.read(block, buffer)) is not None]
    return list(dict.fromkeys(damage))


def check_all(checkpoint: Checkpoint, index: Index, threads: int = 1) -> list[Damage]:
    """Check every byte of every data file, in as many shares as there are threads."""
    blocks = all_blocks(index)
    cuts = [len(blocks) * number // threads for number in range(threads + 1)]
    shares = [(blocks[low:high], [] if low else data_files(checkpoint)) for low, high in pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda share: check_blocks(checkpoint, *share), shares)
        return [damage for by_share in found for damage in by_share]
