"""Token shards on disk: a folder of raw tokens with an index, written whole and checked when it is read.

index.json         what the folder holds, with the size and sha256 of every other file
tokenizer.json     the tokenizer, as the `tokenizers` library writes it
train-00000.bin    tokens, little-endian uint16 or uint32; each document ends with the end-of-text token
train-00000.idx    where each document starts in the .bin, little-endian uint64, in tokens
eval-00000.bin ... the held-out documents, in the same form
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

FORMAT = "shoal-tokens"
VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
START_BYTES = 8
PROBE_BYTES = 256

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Starts = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """One `<file>.bin` and its `<file>.idx`: sizes, and sha256 of both."""

    file: str
    tokens: int
    documents: int
    sha256_bin: str
    sha256_idx: str


@dataclasses.dataclass(frozen=True)
class SplitInfo:
    """The shards of one split in reading order, and their totals."""

    tokens: int
    documents: int
    shards: tuple[ShardInfo, ...]


@dataclasses.dataclass(frozen=True)
class PreparedIndex:
    """What `index.json` says. `key` names the settings and files that the tokens were made from.

    `skipped` counts documents left out: `undecodable` are not UTF-8 text, `empty` hold no characters.
    """

    format: str
    version: int
    key: str
    dtype: Literal["uint16", "uint32"]
    vocab: int
    end_of_text: int
    tokenizer: str
    tokenizer_sha256: str
    source: str
    seed: int
    eval_fraction: float
    skipped: dict[str, int]
    splits: dict[str, SplitInfo]

    @property
    def tokens(self) -> int:
        """Tokens over all splits, end-of-text tokens included."""
        return sum(split.tokens for split in self.splits.values())

    @property
    def documents(self) -> int:
        """Documents over all splits."""
        return sum(split.documents for split in self.splits.values())


class Shard(NamedTuple):
    """An open shard, memory-mapped: tokens (tokens,) and where its documents start (documents,)."""

    tokens: Tokens
    starts: Starts


def token_dtype(vocab: int) -> Literal["uint16", "uint32"]:
    """The smallest type on disk that holds every token id below `vocab`."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def is_prepared(folder: Path) -> bool:
    """Whether a folder is meant to hold token shards, damaged or not; `read_index` checks them."""
    try:
        with (folder / INDEX_FILE).open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(PROBE_BYTES)
    except OSError:
        return (folder / "train-00000.idx").exists()


def read_index(folder: Path) -> PreparedIndex:
    """The index of a prepared folder, after checking that every file is there and has its size.

    Raises:
        ValueError: no index, an index of something else, a missing file or one of another size. Names the
            file.

    Example:
        >>> read_index(Path("tokens")).splits["train"].documents
        9
    """
    index = _parse(folder / INDEX_FILE)
    _check_size(folder / TOKENIZER_FILE, None)
    for split in index.splits.values():
        for shard in split.shards:
            _check_size(folder / f"{shard.file}.bin", shard.tokens * np.dtype(index.dtype).itemsize)
            _check_size(folder / f"{shard.file}.idx", shard.documents * START_BYTES)
    return index


def write_index(folder: Path, index: PreparedIndex) -> None:
    """Write `index.json` of a folder whose other files are complete."""
    (folder / INDEX_FILE).write_text(json.dumps(dataclasses.asdict(index), indent=1) + "\n", encoding="utf-8")


def open_split(folder: Path, index: PreparedIndex, split: str) -> tuple[Shard, ...]:
    """The memory-mapped shards of a split.

    Raises:
        ValueError: the folder has no such split.
    """
    if split not in index.splits:
        raise ValueError(f"{folder} has no split {split!r}, only {', '.join(index.splits)}")
    return tuple(
        Shard(
            np.memmap(folder / f"{shard.file}.bin", dtype=_little_endian(index.dtype), mode="r"),
            np.memmap(folder / f"{shard.file}.idx", dtype="<u8", mode="r"),
        )
        for shard in index.splits[split].shards
    )


def verify(folder: Path) -> PreparedIndex:
    """Read a prepared folder whole and compare every file with its sha256.

    Raises:
        ValueError: names every file that is damaged, missing, or that the index does not list.
    """
    index = read_index(folder)
    expected = {TOKENIZER_FILE: index.tokenizer_sha256}
    for split in index.splits.values():
        for shard in split.shards:
            expected |= {f"{shard.file}.bin": shard.sha256_bin, f"{shard.file}.idx": shard.sha256_idx}
    damaged = [name for name, sha256 in expected.items() if file_sha256(folder / name) != sha256]
    foreign = sorted({path.name for path in folder.iterdir()} - expected.keys() - {INDEX_FILE})
    if damaged or foreign:
        faults = [f"{name} does not match its sha256" for name in damaged]
        faults += [f"{name} is not listed in {INDEX_FILE}" for name in foreign]
        raise ValueError(f"{folder} is damaged: {'; '.join(faults)}. Delete the folder and prepare it again.")
    return index


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _parse(path: Path) -> PreparedIndex:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing, so {path.parent} holds no prepared tokens; prepare it first"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Delete the folder and prepare it again.") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{path} has format {found!r}, expected {FORMAT!r}: this folder holds something else"
        )
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r}, this Shoal reads {VERSION}. Prepare the folder "
            "again."
        )
    try:
        index = TypeAdapter(PreparedIndex).validate_python(content)
    except ValidationError as error:
        raise ValueError(f"{path} is damaged: {error}. Delete the folder and prepare it again.") from None
    _check_consistency(path, index)
    return index


def _check_consistency(path: Path, index: PreparedIndex) -> None:
    for name, split in index.splits.items():
        tokens, documents = sum(s.tokens for s in split.shards), sum(s.documents for s in split.shards)
        if (tokens, documents) != (split.tokens, split.documents):
            raise ValueError(
                f"{path} is damaged: split {name!r} says {split.tokens} tokens in {split.documents} "
                f"documents, its shards add up to {tokens} in {documents}. Delete the folder and prepare it "
                "again."
            )
        for shard in split.shards:
            if Path(shard.file).name != shard.file:
                raise ValueError(
                    f"{path} is damaged: shard {shard.file!r} is not the name of a file beside it"
                )


def _check_size(path: Path, expected: int | None) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is missing. Delete the folder and prepare it again.") from None
    if expected is not None and size != expected:
        raise ValueError(
            f"{path} has {size} bytes, its index says {expected}: it was cut short or replaced. "
            "Delete the folder and prepare it again."
        )
