"""Sources of text: what is read, in which order, what is left out, and what is said when it cannot be."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.data.text import SourceKind, documents, source_kind, text_files
from shoal.job import Data
from tests.data.sources import write_tokens


def read(path: Path | str, **settings: Any) -> tuple[list[str], dict[str, int]]:
    skipped: Counter[str] = Counter()
    found = list(documents(Data(source=str(path), **settings), skipped))
    return found, dict(skipped)


def test_a_source_is_told_by_its_form(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", [[1, 256]])
    kinds = {
        "stdlib": SourceKind.STDLIB,
        "synthetic": SourceKind.SYNTHETIC,
        "hf:someone/something": SourceKind.HUGGING_FACE,
        "package.module:dataset": SourceKind.USER,
        "folder/data.py:dataset": SourceKind.USER,
        str(tmp_path): SourceKind.FILES,
        str(tmp_path / "tokens"): SourceKind.PREPARED,
    }
    assert {source: source_kind(source) for source in kinds} == kinds
    assert source_kind([str(tmp_path), str(tmp_path)]) is SourceKind.FILES
    assert source_kind([str(tmp_path / "tokens")]) is SourceKind.PREPARED


def test_folders_are_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", "c/x.py", "c/.hidden", ".git/config", "__pycache__/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == (["a.txt", "b.md", "c/x.py"], {})


def test_a_walk_leaves_out_prepared_folders_and_ends_in_spite_of_loops(tmp_path: Path) -> None:
    write_tokens(tmp_path / "cache" / "tokens", [[1, 256]])
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "cache" / "loop").symlink_to(tmp_path)
    assert text_files(str(tmp_path)) == [tmp_path / "a.txt"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert text_files([str(tmp_path), str(tmp_path / "a.txt")]) == [tmp_path / "a.txt"]


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"body": text}) for text in ("one", "", "two\nlines"))
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "three"}\n'))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("grün".encode()))
    assert read(tmp_path, text_key="body") == (["one", "two\nlines", "three", "grün"], {"empty": 1})


def test_what_is_not_text_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe latin")
    (tmp_path / "b.bin").write_bytes(b"abc\0def")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "\\ud800"}\n{"text": "fine"}\n\xff\n')
    (tmp_path / "d.txt").write_bytes("\ufeffwith a mark".encode())
    assert read(tmp_path) == (["fine", "with a mark"], {"undecodable": 4})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"text": ', r"a\.jsonl, line 2 is not JSON"),
        (
            '{"body": "x", "id": 3}',
            r"line 1 has no text in field 'text'; it has 'body', 'id'. Set data.text_key",
        ),
        ("[1]", r"it has a list"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_a_truncated_gz_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text " * 100)[:-9])
    with pytest.raises(ValueError, match=r"a\.txt\.gz is a broken or truncated"):
        read(tmp_path)


def test_a_missing_path_names_the_nearest_that_exists(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    with pytest.raises(ValueError, match=rf"nearest that does is {tmp_path}/corpus\."):
        read(tmp_path / "corpse" / "a.txt")


def test_the_standard_library_is_read_without_tests_and_packages() -> None:
    files = text_files("stdlib")
    assert len(files) > 200
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in files)


def test_rows_of_a_hugging_face_dataset_are_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(path: str, **options: str) -> list[dict[str, str]]:
        calls.append((path, options))
        return [{"body": "one"}, {"body": ""}, {"body": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    skipped: Counter[str] = Counter()
    data = Data(source="hf:someone/something", text_key="body", split="validation", options={"name": "small"})
    assert list(documents(data, skipped)) == ["one", "two"]
    assert skipped == {"empty": 1}
    assert calls == [("someone/something", {"split": "validation", "name": "small"})]
    with pytest.raises(ValueError, match=r"row 0 of someone/something \(train\) has no text in field 'text'"):
        list(documents(Data(source="hf:someone/something"), skipped))


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"'hf:x' needs the datasets library: pip install 'shoal\[hf\]'"):
        list(documents(Data(source="hf:x"), Counter()))
