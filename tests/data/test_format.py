"""The format: what is written is what is read, and damage is found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shoal.data.format import is_prepared, open_split, read_index, token_dtype, verify
from tests.data.sources import write_tokens

DOCUMENTS = [[1, 2, 256], [3, 256], [4, 5, 6, 256], [256]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens", DOCUMENTS, [[7, 256]], shard_tokens=4)
    return tmp_path / "tokens"


def test_what_is_written_is_read_back(folder: Path) -> None:
    index = verify(folder)
    shards = open_split(folder, index, "train")
    read = [doc.tolist() for shard in shards for doc in np.split(shard.tokens, shard.starts[1:].astype(int))]
    assert read == DOCUMENTS
    assert (index.tokens, index.documents) == (12, 5)
    assert (index.splits["train"].tokens, len(shards)) == (10, 3)


def test_bytes_on_disk_are_as_documented(folder: Path) -> None:
    assert (folder / "train-00000.bin").read_bytes().hex(" ", 2) == "0100 0200 0001 0300 0001"
    assert (folder / "train-00000.idx").read_bytes() == bytes(8) + b"\x03" + bytes(7)


def test_large_vocabularies_take_four_bytes_a_token() -> None:
    assert [token_dtype(vocab) for vocab in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx", "eval-00000.bin"])
def test_a_truncated_file_is_named_when_the_folder_is_opened(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name} has \d+ bytes, its index says \d+.*prepare it again"):
        read_index(folder)


@pytest.mark.parametrize("name", ["train-00002.bin", "train-00000.idx", "tokenizer.json", "index.json"])
def test_a_missing_file_is_named_when_the_folder_is_opened(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_index(folder)
    assert is_prepared(folder)


@pytest.mark.parametrize("name", ["train-00002.bin", "train-00000.idx", "tokenizer.json"])
def test_a_flipped_bit_is_found_by_verify(folder: Path, name: str) -> None:
    path = folder / name
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    read_index(folder)
    with pytest.raises(ValueError, match=f"{name} does not match its sha256"):
        verify(folder)


def test_a_file_that_is_not_listed_is_found_by_verify(folder: Path) -> None:
    shutil.copy(folder / "train-00000.bin", folder / "train-00009.bin")
    with pytest.raises(ValueError, match=r"train-00009.bin is not listed in index.json"):
        verify(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "parquet"}, "format 'parquet', expected 'shoal-tokens'"),
        ({"version": 2}, "version 2, this Shoal reads 1"),
        ({"vocab": "many"}, "is damaged: (.|\n)*vocab"),
        ({"splits": {"train": {"tokens": 3, "documents": 0, "shards": []}}}, "add up to 0 in 0"),
    ],
)
def test_an_index_of_something_else_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as raised:
        read_index(folder)
    assert "index.json" in str(raised.value)


def test_an_index_that_is_cut_short_is_refused(folder: Path) -> None:
    path = folder / "index.json"
    path.write_text(path.read_text()[:400])
    assert is_prepared(folder)
    with pytest.raises(ValueError, match=r"index.json is not JSON"):
        read_index(folder)


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    path = folder / "index.json"
    path.write_text(path.read_text().replace('"eval-00000"', '"../eval-00000"'))
    with pytest.raises(ValueError, match="is not the name of a file beside it"):
        read_index(folder)


def test_a_folder_of_something_else_is_not_prepared(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{}")
    assert not is_prepared(tmp_path)


def test_a_split_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no split 'test', only train, eval"):
        open_split(folder, read_index(folder), "test")
