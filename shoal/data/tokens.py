"""Windows of text: fixed-length samples over the token shards of one split, read in whole micro-batches."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.format import open_split, read_index
from shoal.data.sampler import Ids

NO_LABEL = -100
"""The label that no loss counts: `ignore_index` of `torch.nn.functional.cross_entropy`."""

Matrix = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokenDataset:
    """The N tokens of a split, its shards one after another, as ceil((N - 1) / seq_len) windows.

    Window i has the tokens i * seq_len ... and as labels the tokens one further on. Every token but the first
    is a label exactly once; the last window is filled up with labels of -100.

    With `isolate_documents`, "documents" number the documents of a window from 0 on, "positions" count from 0
    in each, and the end of a document has the label -100: what follows it is no continuation of it.

    Raises:
        ValueError: the folder is damaged, has no such split, or the split has fewer than 2 tokens.

    Example:
        >>> dataset = TokenDataset(Path("tokens"), "train", seq_len=16)
        >>> dataset.fetch(np.array([0, 3]))["tokens"].shape
        torch.Size([2, 16])
    """

    def __init__(self, folder: Path, split: str, seq_len: int, isolate_documents: bool = False) -> None:
        index = read_index(folder)
        self._shards = open_split(folder, index, split)
        self._ends = np.cumsum([len(shard.tokens) for shard in self._shards], dtype=np.int64)
        self._files = [folder / f"{shard.file}.bin" for shard in index.splits[split].shards]
        self._fill = index.end_of_text
        self.num_tokens = index.splits[split].tokens
        self.seq_len = seq_len
        self.isolate_documents = isolate_documents
        if self.num_tokens < 2:
            raise ValueError(
                f"split {split!r} of {folder} has {self.num_tokens} tokens; at least 2 make a sample. "
                "Give more text, or another data.eval_fraction."
            )

    def __len__(self) -> int:
        return (self.num_tokens - 2) // self.seq_len + 1  # ceil((N - 1) / seq_len)

    def fetch(self, index: Ids) -> dict[str, torch.Tensor]:
        """The windows `index` (B,): "tokens", "labels"[, "documents", "positions"], (B, seq_len) int64."""
        tokens = np.full((len(index), self.seq_len + 1), self._fill, dtype=np.int64)
        begins = np.zeros(tokens.shape, dtype=np.bool_) if self.isolate_documents else None
        for row, number in enumerate(index.tolist()):
            self._copy(number * self.seq_len, tokens[row], None if begins is None else begins[row])
        labels = tokens[:, 1:].copy()
        for row in np.flatnonzero((index + 1) * self.seq_len >= self.num_tokens):
            labels[row, self.num_tokens - 1 - int(index[row]) * self.seq_len :] = NO_LABEL
        data = {"tokens": np.ascontiguousarray(tokens[:, :-1]), "labels": labels}
        if begins is not None:
            labels[begins[:, 1:]] = NO_LABEL
            data["documents"], data["positions"] = number_documents(begins[:, :-1])
        return {name: torch.from_numpy(array) for name, array in data.items()}

    def _copy(self, start: int, tokens: npt.NDArray[np.int64], begins: Mask | None) -> None:
        """Fill a row with the tokens from `start` on, and mark where documents begin, over shard borders."""
        written = 0
        number = int(np.searchsorted(self._ends, start, side="right"))
        while written < len(tokens) and number < len(self._shards):
            shard = self._shards[number]
            require_whole(self._files[number], shard.tokens.nbytes)
            at = start + written - (int(self._ends[number]) - len(shard.tokens))
            part = shard.tokens[at : at + len(tokens) - written]
            tokens[written : written + len(part)] = part
            if begins is not None:
                # Keys of the array's own type: others would make searchsorted convert the whole file.
                span = np.searchsorted(shard.starts, np.array([at, at + len(part)], dtype=np.uint64))
                begins[written + shard.starts[slice(*span)].astype(np.int64) - at] = True
            written, number = written + len(part), number + 1


def require_whole(path: Path, size: int) -> None:
    """Raises ValueError for a mapped file that was cut short since: reading what is gone would kill the process (SIGBUS).

    One that is deleted stays readable as long as it is mapped.
    """
    with suppress(FileNotFoundError):
        if (found := path.stat().st_size) < size:
            raise ValueError(
                f"{path} has {found} bytes, and had {size} when it was opened: it was cut short while this run reads it. "
                "Delete the folder and prepare it again; the run then goes on from its newest checkpoint."
            )


def number_documents(begins: Mask) -> tuple[Matrix, Matrix]:
    """(documents, positions), both (B, T), from a mask (B, T) of where documents begin.

    Example:
        >>> documents, positions = number_documents(np.array([[False, False, True, False]]))
        >>> documents.tolist(), positions.tolist()
        ([[0, 0, 1, 1]], [[0, 1, 0, 1]])
    """
    begins = begins.copy()
    begins[:, 0] = False  # the window's first token is in document 0, whether it starts one or not
    column = np.arange(begins.shape[1])
    starts = np.maximum.accumulate(np.where(begins, column, 0), axis=1)
    return np.cumsum(begins, axis=1, dtype=np.int64), column - starts
