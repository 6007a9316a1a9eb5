"""Where a checkpoint's tensors lie: data files of raw bytes, one a rank, and `index.json`, which finds them.

A data file is a header of 64 bytes and then tensors without a gap, the widest types first, so that each lies at a multiple of
its element's size. The bytes of a piece (what one rank wrote of a tensor) have a CRC-32 for each 4 MiB: every byte of a file is
either the header's or counted by exactly one checksum, which belongs to one tensor. Nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.checkpoint.folder import INDEX, Checkpoint

if TYPE_CHECKING:  # who only writes files needs no torch
    import torch

BLOCK_BYTES = 4 * 2**20
HEADER_BYTES = 64
_HEADER = struct.Struct("<8s16sQII20xI")  # magic, save, step, rank, ranks, zeros, CRC-32 of what is before
_MAGIC = b"SHOALCK2"


class Piece(NamedTuple):
    """A box of a tensor, in C order, in a file."""

    offsets: tuple[int, ...]
    """where the box begins in the whole tensor, dim by dim"""
    sizes: tuple[int, ...]
    file: str
    at: int
    """the first byte in the file"""
    crc32: tuple[int, ...]
    """of each 4 MiB"""


class Stored(NamedTuple):
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


Index = dict[str, Stored]


class Damage(NamedTuple):
    """What is not as it was written."""

    file: str
    tensor: str
    """empty: all that are in the file"""
    what: str

    def describe(self) -> str:
        return f"{self.file}: {f'tensor {self.tensor!r}: ' if self.tensor else ''}{self.what}"


class DamagedError(ValueError):
    """`index.json` is not what the manifest says."""


class Origin(NamedTuple):
    """Which save a data file is of; its header says it."""

    save: str
    """32 hex digits, random, the same in all files of a save"""
    step: int
    rank: int
    ranks: int

    @property
    def file(self) -> str:
        return f"rank-{self.rank:05d}.bin"

    def header(self) -> bytes:
        packed = _HEADER.pack(_MAGIC, bytes.fromhex(self.save), self.step, self.rank, self.ranks, 0)
        return packed[:-4] + struct.pack("<I", zlib.crc32(packed[:-4]))

    def difference(self, header: bytes) -> str:
        """What is wrong with a file's header; empty if nothing is."""
        if header == self.header():
            return ""
        if len(header) == HEADER_BYTES and zlib.crc32(header[:-4]) == struct.unpack("<I", header[-4:])[0]:
            _, save, step, rank, ranks, _ = _HEADER.unpack(header)
            found = Origin(save.hex(), step, rank, ranks)
            return f"it is of another save: {found.describe()}, expected {self.describe()}"
        return "its header is damaged"

    def describe(self) -> str:
        return f"save {self.save[:8]} of step {self.step}, rank {self.rank} of {self.ranks}"


def origin_of(checkpoint: Checkpoint, file: str) -> Origin:
    """What the header of a checkpoint's file has to say."""
    return Origin(
        checkpoint.manifest["save"],
        checkpoint.manifest["step"],
        int(file.removeprefix("rank-").removesuffix(".bin")),
        checkpoint.manifest["ranks"],
    )


def data_files(checkpoint: Checkpoint) -> list[str]:
    """The files that hold tensors."""
    return sorted(name for name in checkpoint.manifest["files"] if name.endswith(".bin"))


def piece_bytes(piece: Piece, dtype: torch.dtype) -> int:
    return math.prod(piece.sizes) * dtype.itemsize


def index_text(pieces: dict[str, list[Piece]]) -> str:
    """`index.json`."""
    return json.dumps(
        {name: [piece._asdict() for piece in pieces[name]] for name in sorted(pieces)}, separators=(",", ":")
    )


def read_index(checkpoint: Checkpoint) -> Index:
    """Where every tensor of a checkpoint lies.

    Raises:
        DamagedError: the file is not the one that the manifest knows.
        OSError: it cannot be read.
    """
    body = (checkpoint.path / INDEX).read_bytes()
    if hashlib.sha256(body).hexdigest() != checkpoint.manifest["index_sha256"]:
        raise DamagedError(f"{INDEX} is damaged: its sha256 is not the one in the manifest")
    table = json.loads(body)
    return {
        name: Stored(
            dtype_of(fact["dtype"]), tuple(fact["shape"]), tuple(_piece(entry) for entry in table[name])
        )
        for name, fact in checkpoint.manifest["tensors"].items()
    }


def _piece(entry: dict[str, Any]) -> Piece:
    if not re.fullmatch(r"rank-\d{5,}\.bin", entry["file"]):
        raise DamagedError(f"{INDEX} names a file {entry['file']!r}, which is none of a checkpoint's")
    return Piece(
        tuple(entry["offsets"]), tuple(entry["sizes"]), entry["file"], entry["at"], tuple(entry["crc32"])
    )


def dtype_of(name: str) -> torch.dtype:
    """A torch type by its name.

    Example:
        >>> dtype_of("bfloat16")
        torch.bfloat16
    """
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of this version of torch ({torch.__version__})")
    return found
