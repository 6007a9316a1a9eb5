"""Writing: a folder appears whole or not at all, and one process at a time writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.data.writer import folder_lock, whole_folder


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    with whole_folder(folder) as aside:
        (aside / "a").write_text("1")
        assert not folder.exists()
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), whole_folder(tmp_path / "tokens") as aside:
        (aside / "a").write_text("1")
        raise RuntimeError("half way")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".tokens.partial-0123").mkdir()
    with whole_folder(tmp_path / "tokens"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "mine").write_text("precious")
    with pytest.raises(ValueError, match="tokens is in the way"), whole_folder(tmp_path / "tokens"):
        pass
    assert (tmp_path / "tokens" / "mine").read_text() == "precious"


def test_a_lock_that_is_held_too_long_names_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    with (
        folder_lock(folder, deadline_s=1),
        pytest.raises(TimeoutError, match=r"\.tokens\.lock is still held by process \d+ after 0 s"),
        folder_lock(folder, deadline_s=0.2),
    ):
        pass
    with folder_lock(folder, deadline_s=0):
        pass
