"""Synthetic tokens: no disk, a pure function of (seed, index), with a structure that a model can learn."""

from __future__ import annotations

import numpy as np
import torch

from shoal.data.sampler import Ids, mix, round_keys
from shoal.data.tokens import number_documents

TRAIN_SAMPLES = 1 << 30
EVAL_SAMPLES = 64
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the counter step of splitmix64
JUMP_BITS = 3


class SyntheticDataset:
    """Samples of a Markov chain over range(vocab): the next token is the last one + 1, but for 1 in 8 jumps.

    A jump goes to k with a probability of about 1 / k (all powers of two alike), so a model learns first the
    frequent tokens, then the successor of each. A perfect one has a loss of h(1/8) + 1/8 of a jump's entropy:
    about 1.1 nats at a vocabulary of 4096, where guessing has 8.3.

    Integer arithmetic alone, so every machine gives the same tokens. `first` tells disjoint sets apart.

    Example:
        >>> SyntheticDataset(vocab=512, seq_len=8, seed=0).fetch(np.array([5]))["tokens"].shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        vocab: int,
        seq_len: int,
        seed: int,
        *,
        samples: int = TRAIN_SAMPLES,
        first: int = 0,
        isolate_documents: bool = False,
    ) -> None:
        self.vocab, self.seq_len = vocab, seq_len
        self.isolate_documents = isolate_documents
        self._samples, self._first = samples, first
        self._key = round_keys(f"synthetic/{seed}")[0]

    def __len__(self) -> int:
        return self._samples

    def fetch(self, index: Ids) -> dict[str, torch.Tensor]:
        """The samples `index` (B,): "tokens", "labels"[, "documents", "positions"], (B, seq_len) int64."""
        tokens = self._chain((index + self._first).astype(np.uint64))
        data = {"tokens": np.ascontiguousarray(tokens[:, :-1]), "labels": np.ascontiguousarray(tokens[:, 1:])}
        if self.isolate_documents:  # each sample is one document
            begins = np.zeros(data["tokens"].shape, dtype=np.bool_)
            data["documents"], data["positions"] = number_documents(begins)
        return {name: torch.from_numpy(array) for name, array in data.items()}

    def _chain(self, index: np.ndarray) -> np.ndarray:
        column = np.arange(self.seq_len + 1)
        start = mix(index * GOLDEN + self._key)
        bits = mix(start[:, None] + column.astype(np.uint64) * GOLDEN)  # (B, seq_len + 1)
        jumps = bits >> np.uint64(64 - JUMP_BITS) == 0
        jumps[:, 0] = True
        last = np.maximum.accumulate(np.where(jumps, column, 0), axis=1)
        return (np.take_along_axis(self._targets(bits), last, axis=1) + column - last) % self.vocab

    def _targets(self, bits: np.ndarray) -> np.ndarray:
        """Where a jump would go: uniform below 2, 4, 8, ..., vocab, each bound equally often."""
        bounds = np.array(
            [min(2 << level, self.vocab) for level in range((self.vocab - 1).bit_length())], dtype=np.uint64
        )
        level = (bits >> np.uint64(32) & np.uint64(0xFFFFFF)) % np.uint64(len(bounds))
        return ((bits & np.uint64(0xFFFFFFFF)) % bounds[level]).astype(np.int64)
