"""Preparing: the same tokens whatever the workers, a held-out split that knows no order, no half results."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import prepare as preparing
from shoal.data.format import PreparedIndex, open_split, read_index, verify
from shoal.data.prepare import Survey, held_out, prepare, prepared_key
from shoal.job import Data


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(
            f"document {number}: " + "some words of it. " * (number + 1)
        )
    return folder


def documents(folder: Path, split: str) -> list[bytes]:
    """The documents of a split, of byte tokens."""
    shards = open_split(folder, read_index(folder), split)
    found = [doc for shard in shards for doc in np.split(shard.tokens, shard.starts[1:].astype(int))]
    assert all(doc[-1] == 256 for doc in found)
    return [bytes(doc[:-1].astype(np.uint8)) for doc in found]


def test_the_tokens_are_the_texts(texts: Path, tmp_path: Path) -> None:
    data = Data(source=str(texts), tokenizer="bytes", eval_fraction=0.2)
    index = prepare(data, 0, tmp_path / "out", shard_tokens=1000)
    train, held = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "eval")
    assert sorted(train + held) == sorted(path.read_bytes() for path in texts.iterdir())
    assert index == verify(tmp_path / "out")
    assert (index.vocab, index.documents, index.source) == (257, 30, str(texts))
    assert len(index.splits["train"].shards) > 2


def test_the_result_does_not_depend_on_the_number_of_workers(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "CHUNK_CHARACTERS", 700)  # more chunks than workers
    data = Data(source=str(texts), vocab=300, eval_fraction=0.1)
    found = [prepare(data, 0, tmp_path / f"out{workers}", workers=workers) for workers in (1, 2)]
    assert found[0] == found[1]  # and with it the sha256 of every file


def test_the_held_out_documents_do_not_depend_on_order_or_neighbours(texts: Path, tmp_path: Path) -> None:
    data = Data(source=str(texts), tokenizer="bytes", eval_fraction=0.2)
    prepare(data, 0, tmp_path / "all")
    names = sorted(str(path) for path in texts.iterdir())
    prepare(data.model_copy(update={"source": names[:14:-1]}), 0, tmp_path / "half")
    half = {Path(name).read_bytes() for name in names[15:]}
    assert set(documents(tmp_path / "half", "eval")) == set(documents(tmp_path / "all", "eval")) & half
    prepare(data, 1, tmp_path / "other")
    assert documents(tmp_path / "other", "eval") != documents(tmp_path / "all", "eval")


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_two_documents_are_enough_for_both_splits(texts: Path, tmp_path: Path, fraction: float) -> None:
    data = Data(
        source=[str(texts / "00.txt"), str(texts / "01.txt")], tokenizer="bytes", eval_fraction=fraction
    )
    splits = prepare(data, 0, tmp_path / "out").splits
    assert [splits["train"].documents, splits["eval"].documents] == [1, 1]


def test_nothing_is_held_out_of_one_document_or_with_no_fraction() -> None:
    survey = Survey(1, 10, 0, 0, skipped=preparing.Counter())
    assert not held_out(0, 0, survey, 0.5)
    assert not held_out(0, 0, survey._replace(documents=9, highest=3), 0.0)


def test_a_prepared_folder_is_used_again_and_never_mixed_up(texts: Path, tmp_path: Path) -> None:
    data = Data(source=str(texts), tokenizer="bytes")
    first = prepare(data, 0, tmp_path / "out")
    changed = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    assert prepare(data, 0, tmp_path / "out") == first
    assert (tmp_path / "out" / "index.json").stat().st_mtime_ns == changed
    with pytest.raises(ValueError, match=r"prepared from other settings or other files: .* seed 0"):
        prepare(data, 1, tmp_path / "out")
    with pytest.raises(ValueError, match="is in the way: it holds no prepared tokens"):
        prepare(data, 0, texts)


def test_the_key_changes_with_what_matters_and_nothing_else(texts: Path) -> None:
    data = Data(source=str(texts))
    key = prepared_key(data)
    changes: list[dict[str, Any]] = [{"vocab": 500}, {"tokenizer": "bytes"}, {"eval_fraction": 0.5}]
    changes += [{"text_key": "body"}, {"source": "stdlib"}]
    assert len({key, *(prepared_key(data.model_copy(update=change)) for change in changes)}) == 6
    assert key == prepared_key(
        data.model_copy(update={"seq_len": 9, "shuffle": False, "isolate_documents": True})
    )
    assert key != prepared_key(data, seed=1)
    os.utime(texts / "00.txt", ns=(0, 0))
    touched = prepared_key(data)
    assert touched != key
    (texts / "new.txt").write_text("x")
    assert prepared_key(data) not in (key, touched)


def test_only_text_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'synthetic' is synthetic tokens, which is read as it is"):
        prepare(Data(source="synthetic"), 0, tmp_path / "out")


def test_a_source_without_text_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.bin").write_bytes(b"\xff\xff")
    (tmp_path / "texts" / "b.txt").touch()
    with pytest.raises(ValueError, match="holds no text: 1 files or rows are not UTF-8 text, 1 are empty"):
        prepare(Data(source=str(tmp_path / "texts")), 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_tokenizer_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.tokenizer is 'gpt2'; expected"):
        prepare(Data(source=str(texts), tokenizer="gpt2"), 0, tmp_path / "out")


def test_skipped_files_are_reported_in_the_index(texts: Path, tmp_path: Path) -> None:
    (texts / "picture.png").write_bytes(b"\x89PNG\0")
    (texts / "empty.txt").touch()
    index = prepare(Data(source=str(texts), tokenizer="bytes"), 0, tmp_path / "out")
    assert index.skipped == {"undecodable": 1, "empty": 1}


def test_a_tokenizer_of_much_text_is_trained_on_a_part_of_it(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "BPE_PIECE_CHARACTERS", 100)
    data = Data(source=str(texts))
    whole = sum(map(len, preparing.training_texts(data, 1.0)))
    part = sum(map(len, preparing.training_texts(data, 0.5)))
    assert 0.3 < part / whole < 0.7


def test_progress_tells_the_stages_and_ends_complete(texts: Path, tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []
    prepare(
        Data(source=str(texts), vocab=300), 0, tmp_path / "out", progress=lambda *call: calls.append(call)
    )
    assert calls[0] == ("survey", 30, 30)
    assert ("tokenizer", 1, 1) in calls
    assert calls[-1] == ("encode", 30, 30)


def test_a_source_that_changes_while_it_is_read_is_refused(texts: Path, tmp_path: Path) -> None:
    def grow(stage: str, done: int, total: int | None) -> None:
        if stage == "tokenizer":
            (texts / "new.txt").write_text("a late document")

    with pytest.raises(ValueError, match="changed while it was read: 30 documents, then 31"):
        prepare(Data(source=str(texts), tokenizer="bytes"), 0, tmp_path / "out", progress=grow)
    assert not (tmp_path / "out").exists()


def test_processes_that_prepare_one_folder_at_once_share_one_result(texts: Path, tmp_path: Path) -> None:
    data = Data(source=str(texts), vocab=400)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found: list[PreparedIndex] = pool.starmap(prepare, [(data, 0, tmp_path / "out")] * 3)
    assert found[0] == found[1] == found[2] == verify(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out", "texts"]
