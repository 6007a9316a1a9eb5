"""Windows of text: compared with a slow reference that walks over a plain list of tokens."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.tokens import NO_LABEL, TokenDataset
from tests.data.sources import write_tokens

END = 256
DOCUMENTS = st.lists(st.lists(st.integers(0, 255), min_size=0, max_size=12), min_size=1, max_size=8)


def reference(documents: list[list[int]], seq_len: int, isolate: bool) -> list[dict[str, list[int]]]:
    """Every window, token by token."""
    flat = [(token, number) for number, document in enumerate(documents) for token in document]
    windows = []
    for start in range(0, len(flat) - 1, seq_len):
        window: dict[str, list[int]] = {"tokens": [], "labels": [], "documents": [], "positions": []}
        for place in range(start, start + seq_len):
            token, document = flat[min(place, len(flat) - 1)] if place < len(flat) else (END, flat[-1][1])
            has_next = place + 1 < len(flat)
            crosses = isolate and has_next and flat[place + 1][1] != document
            window["tokens"].append(token)
            window["labels"].append(flat[place + 1][0] if has_next and not crosses else NO_LABEL)
            same = place > start and flat[min(place - 1, len(flat) - 1)][1] == document
            window["positions"].append(window["positions"][-1] + 1 if same else 0)
            window["documents"].append(document - flat[start][1])
        windows.append(window if isolate else {name: window[name] for name in ("tokens", "labels")})
    return windows


@pytest.mark.parametrize("isolate", [False, True])
@given(documents=DOCUMENTS, seq_len=st.integers(1, 20), shard_tokens=st.integers(1, 30))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_windows_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory,
    isolate: bool,
    documents: list[list[int]],
    seq_len: int,
    shard_tokens: int,
) -> None:
    ended = [[*document, END] for document in [[1], *documents]]
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder, ended, shard_tokens=shard_tokens)
    dataset = TokenDataset(folder, "train", seq_len, isolate)
    expected = reference(ended, seq_len, isolate)
    found = dataset.fetch(np.arange(len(dataset)))
    assert len(dataset) == len(expected)
    assert {name: found[name].tolist() for name in found} == {
        name: [window[name] for window in expected] for name in expected[0]
    }


def test_every_token_but_the_first_is_a_label_exactly_once(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[*range(50), END]], shard_tokens=7)
    dataset = TokenDataset(tmp_path, "train", seq_len=8)
    labels = dataset.fetch(np.arange(len(dataset)))["labels"].flatten()
    assert labels[labels != NO_LABEL].tolist() == [*range(1, 50), END]


def test_a_sequence_longer_than_the_text_is_one_padded_window(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[1, 2, END]])
    dataset = TokenDataset(tmp_path, "train", seq_len=6)
    found = dataset.fetch(np.array([0]))
    assert len(dataset) == 1
    assert found["tokens"].tolist() == [[1, 2, END, END, END, END]]
    assert found["labels"].tolist() == [[2, END, NO_LABEL, NO_LABEL, NO_LABEL, NO_LABEL]]


def test_a_split_without_text_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[END]])
    with pytest.raises(ValueError, match=r"'train' of .* has 1 tokens; at least 2"):
        TokenDataset(tmp_path, "train", seq_len=4)
    with pytest.raises(ValueError, match="'eval' of"):
        TokenDataset(tmp_path, "eval", seq_len=4)


def test_large_ids_survive(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[100_000, 5, 200_000]], vocab=200_001)
    assert TokenDataset(tmp_path, "train", 2).fetch(np.array([0]))["tokens"].tolist() == [[100_000, 5]]


def test_a_shard_that_is_cut_short_while_it_is_read_is_named_and_one_that_is_deleted_stays_readable(
    tmp_path: Path,
) -> None:
    write_tokens(tmp_path, [[*range(1000), 1000]] * 40, vocab=1001, shard_tokens=10_000)
    dataset = TokenDataset(tmp_path, "train", 16)
    ends = np.array([0, len(dataset) // 3, len(dataset) - 1])  # of the first, the second and the last shard
    right = dataset.fetch(ends)["tokens"]
    second = tmp_path / "train-00001.bin"
    second.unlink()
    assert dataset.fetch(ends)["tokens"].equal(right)
    last = sorted(tmp_path.glob("*.bin"))[-1]
    os.truncate(last, 5000)
    with pytest.raises(
        ValueError, match=rf"{last} has 5000 bytes, and had \d+ .*Delete the folder and prepare it again"
    ):
        dataset.fetch(ends)
    with pytest.raises(ValueError, match=rf"{second} is missing. Delete the folder and prepare it again"):
        TokenDataset(tmp_path, "train", 16)
