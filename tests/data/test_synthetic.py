"""Synthetic tokens: the same everywhere, and learnable."""

from __future__ import annotations

import numpy as np
import torch

from shoal.data.synthetic import SyntheticDataset


def test_a_sample_is_a_function_of_seed_and_index_alone() -> None:
    dataset = SyntheticDataset(vocab=300, seq_len=32, seed=1)
    whole = dataset.fetch(np.array([3, 9, 4]))
    assert torch.equal(whole["tokens"][1], dataset.fetch(np.array([9]))["tokens"][0])
    assert not torch.equal(whole["tokens"][0], whole["tokens"][1])
    other = SyntheticDataset(vocab=300, seq_len=32, seed=2).fetch(np.array([3]))
    assert not torch.equal(whole["tokens"][0], other["tokens"][0])
    assert whole["tokens"][0, :6].tolist() == [24, 6, 7, 8, 9, 10]


def test_labels_are_the_tokens_one_further_on() -> None:
    found = SyntheticDataset(vocab=300, seq_len=32, seed=1).fetch(np.arange(4))
    assert torch.equal(found["tokens"][:, 1:], found["labels"][:, :-1])
    assert found["tokens"].dtype == found["labels"].dtype == torch.int64


def test_seven_of_eight_tokens_follow_from_the_one_before() -> None:
    found = SyntheticDataset(vocab=4096, seq_len=256, seed=0).fetch(np.arange(64))
    follows = (found["labels"] == (found["tokens"] + 1) % 4096).double().mean().item()
    assert 0.86 < follows < 0.90  # 7/8, and jumps that land there
    assert found["tokens"].min() >= 0 and found["tokens"].max() < 4096


def test_some_tokens_are_much_more_frequent_than_others() -> None:
    tokens = SyntheticDataset(vocab=4096, seq_len=256, seed=0).fetch(np.arange(64))["tokens"]
    assert (tokens < 64).double().mean() > 0.3


def test_isolated_samples_are_one_document_each() -> None:
    found = SyntheticDataset(vocab=300, seq_len=4, seed=1, isolate_documents=True).fetch(np.arange(2))
    assert found["documents"].tolist() == [[0, 0, 0, 0]] * 2
    assert found["positions"].tolist() == [[0, 1, 2, 3]] * 2


def test_sets_that_start_elsewhere_share_no_sample() -> None:
    train = SyntheticDataset(vocab=300, seq_len=32, seed=1)
    held_out = SyntheticDataset(vocab=300, seq_len=32, seed=1, samples=4, first=1 << 30)
    assert len(held_out) == 4
    assert not torch.equal(held_out.fetch(np.array([0]))["tokens"], train.fetch(np.array([0]))["tokens"])
