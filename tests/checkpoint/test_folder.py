"""A checkpoint folder is complete or it is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.checkpoint.folder import (
    Checkpoint,
    Refused,
    commit,
    inspect,
    list_checkpoints,
    name_of,
    prune,
    set_aside,
    start,
)


def write(folder: Path, step: int) -> Path:
    aside = start(folder, step)
    (aside / "0.bin").write_bytes(bytes(range(100)))
    return commit(aside, {"step": step})


def test_a_committed_folder_is_found_with_its_manifest(tmp_path: Path) -> None:
    path = write(tmp_path, 20)
    (found,), refused = list_checkpoints(tmp_path)
    assert (found.step, found.path, refused) == (20, path, [])
    assert found.manifest["step"] == 20 and found.manifest["files"] == {"0.bin": 100}


def test_checkpoints_are_listed_by_step_and_not_by_time(tmp_path: Path) -> None:
    for step in (100, 9, 1000):
        write(tmp_path, step)
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [9, 100, 1000]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "COMMIT").unlink(), "COMMIT"),
        (lambda path: (path / "0.bin").write_bytes(b"short"), "0.bin has 5 bytes, expected 100"),
        (lambda path: (path / "0.bin").unlink(), "0.bin is missing"),
        (
            lambda path: (path / "manifest.json").write_text("{"),
            "manifest.json cannot be read: it is damaged",
        ),
        (
            lambda path: (path / "COMMIT").write_text(""),
            "manifest.json cannot be read: it is damaged, or COMMIT is",
        ),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
    ids=["no commit", "cut short", "missing file", "broken manifest", "broken commit", "no manifest"],
)
def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_is_found(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    good, refused = list_checkpoints(tmp_path)
    assert [found.step for found in good] == [1]
    assert len(refused) == 1 and reason in refused[0].reason


def test_a_save_that_was_killed_is_no_checkpoint_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    write(tmp_path, 1)
    aside = start(tmp_path, 2)
    (aside / "0.bin").write_bytes(b"half")
    assert isinstance(inspect(aside), Refused)
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [1]
    assert isinstance(inspect(write(tmp_path, 2)), Checkpoint)
    assert not aside.exists()


def test_pruning_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / name_of(4) / "COMMIT").unlink()  # not complete: it must not push out a good one
    start(tmp_path, 2)
    start(tmp_path, 9)  # may be in the making
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002",
        "step-00000003",
        "step-00000004",
        "step-00000009.tmp",
    ]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5)
    aside = start(tmp_path, 5)
    (aside / "1.bin").write_bytes(b"new")
    commit(aside, {})
    (found,), _ = list_checkpoints(tmp_path)
    assert found.manifest["files"] == {"1.bin": 3}


def test_a_kill_while_a_step_is_replaced_leaves_the_older_one(tmp_path: Path) -> None:
    write(tmp_path, 4)
    write(tmp_path, 5).rename(tmp_path / "step-00000005.old")  # where the kill came between two renames
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [4, 5]
    write(tmp_path, 5)
    assert list_checkpoints(tmp_path)[0][-1].path.name == "step-00000005"
    prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_checkpoint_that_was_set_aside_takes_no_place_and_goes_with_the_next(tmp_path: Path) -> None:
    write(tmp_path, 4)
    set_aside(write(tmp_path, 5))
    write(tmp_path, 3)
    prune(tmp_path, keep=2)
    good, refused = list_checkpoints(tmp_path)
    assert [found.step for found in good] == [3, 4] and "found damaged" in refused[0].reason
    write(tmp_path, 6)
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


def test_what_an_earlier_version_wrote_is_refused_and_says_how_to_take_it_over(tmp_path: Path) -> None:
    path = tmp_path / "step-00000004"
    path.mkdir()
    (path / "manifest.json").write_text('{"format": 1, "step": 4, "files": {}}')
    (path / "COMMIT").write_text("")
    found = inspect(path)
    assert isinstance(found, Refused)
    assert "format 1" in found.reason and "shoal checkpoint import" in found.reason
