"""Datasets and token folders that the data tests read, small enough to know every answer."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shoal.data.batches import StepBatch
from shoal.data.format import FORMAT, VERSION, PreparedIndex, file_sha256, token_dtype, write_index
from shoal.data.tokenizer import bytes_tokenizer
from shoal.data.writer import SplitWriter


class Place(NamedTuple):
    """A rank of a world that needs no processes."""

    rank: int
    size: int


def write_tokens(
    folder: Path,
    train: list[list[int]],
    held_out: list[list[int]] | None = None,
    vocab: int = 257,
    shard_tokens: int = 1 << 20,
) -> PreparedIndex:
    """A prepared folder with exactly these documents (each ending with its end-of-text token)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(bytes_tokenizer().json)
    splits = {}
    for name, documents in (("train", train), ("eval", held_out or [])):
        writer = SplitWriter(folder, name, token_dtype(vocab), shard_tokens)
        for document in documents:
            writer.add(np.array(document))
        splits[name] = writer.close()
    index = PreparedIndex(
        format=FORMAT,
        version=VERSION,
        key="by-hand",
        dtype=token_dtype(vocab),
        vocab=vocab,
        end_of_text=vocab - 1,
        tokenizer="bytes",
        tokenizer_sha256=file_sha256(folder / "tokenizer.json"),
        source="by hand",
        seed=0,
        eval_fraction=0.0,
        skipped={},
        splits=splits,
    )
    write_index(folder, index)
    return index


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Sample i is (i, three random numbers): from Python's, numpy's and torch's global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Pairs(Numbers):
    """With a collate function of its own: a micro-batch is a plain list."""

    def collate_fn(self, samples: list[int]) -> list[tuple[str, int]]:
        return [("sample", sample) for sample in samples]


class Broken(Numbers):
    """Sample 5 cannot be read."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("the disk is gone")
        return index


class Stuck(Numbers):
    """Sample 5 never comes."""

    def __getitem__(self, index: int) -> int:
        while index == 5:
            pass
        return index


class Deadly(Augmented):
    """A process that reads sample 5 ends, by a signal or with an exit code; `times` times, or always."""

    def __init__(self, n: int, how: int = -9, times: int = 1 << 30, folder: Path | None = None) -> None:
        super().__init__(n)
        self.how, self.times, self.folder = how, times, folder

    def __getitem__(self, index: int) -> Any:
        if index == 5 and self._again():
            if self.how >= 0:
                os._exit(self.how)
            os.kill(os.getpid(), -self.how)
        return super().__getitem__(index)

    def _again(self) -> bool:
        if self.folder is None:
            return True
        before = len(list(self.folder.iterdir()))
        (self.folder / str(before)).touch()
        return before < self.times


class Patchy(Augmented):
    """Some samples cannot be read; `read` has what was asked for."""

    def __init__(self, n: int, bad: tuple[int, ...] = (3, 5)) -> None:
        super().__init__(n)
        self.bad = bad
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        if index in self.bad:
            raise OSError(f"no file {index}.png")
        return super().__getitem__(index)


class Moody(Augmented):
    """Samples whose augmentation fails in some epochs."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if random.random() < 0.2:
            raise ValueError("the crop is empty")
        return sample


class Stream(IterableDataset[int]):
    """0, 1, ..., n - 1; deals them out to loader processes if it sees any, as some libraries do."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.n) if info is None else range(info.id, self.n, info.num_workers)


class ShuffledStream(Stream):
    """0, 1, ..., n - 1 with noise, in an order drawn from the global random numbers."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(self.n).tolist():
            yield number, random.random()


class BrokenStream(Stream):
    """Ends with an error after n samples."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        raise OSError("the socket is closed")


class OwnPart(IterableDataset[torch.Tensor]):
    """Each rank's own stream: lengths[rank] samples (features (2,), number)."""

    def __init__(self, lengths: tuple[int, ...], rank: int = 0) -> None:
        self.lengths, self.rank = lengths, rank

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.lengths[self.rank]):
            sample = sum(self.lengths[: self.rank]) + number
            yield torch.tensor([1.0, float(sample)]), sample


def numbers(n: int = 10) -> Numbers:
    return Numbers(n)


def train_and_eval(n: int = 10) -> tuple[Numbers, Stream]:
    return Numbers(n), Stream(3)


def nothing() -> None:
    """Returns no dataset."""


three = Numbers(3)


def ids(batch: StepBatch) -> list[int]:
    """The samples of a step that count, of a dataset whose samples are numbers."""
    return [number for micro in batch.micro_batches if micro.samples for number in micro.data.tolist()]
