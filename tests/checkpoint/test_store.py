"""A checkpoint holds all that training needs, is refused where it does not fit, and a failed write leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.store import CheckpointError, load, newest, save
from shoal.world import World
from tests.ranks import run_ranks


def state(value: float, rows: int = 3) -> dict[str, Tensor]:
    return {"model.weight": torch.full((rows, 2), value), "buffer.seen": torch.tensor(value)}


def save_steps(world: World, folder: Path, steps: list[int], keep: int) -> None:
    for step in steps:
        save(folder, step, state(float(step)), {"job": {}}, world, keep=keep)


def load_newest(world: World, folder: Path, found: dict[str, Tensor]) -> dict[str, Tensor]:
    checkpoint, _ = newest(folder, world)
    assert checkpoint is not None
    load(checkpoint, found, world)
    return found


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2)])
def test_what_is_saved_is_loaded_by_any_number_of_ranks(writers: int, readers: int, tmp_path: Path) -> None:
    run_ranks(writers, save_steps, tmp_path, [4], 2)
    for found in run_ranks(readers, load_newest, tmp_path, state(0.0)):
        assert all(torch.equal(found[name], tensor) for name, tensor in state(4.0).items())


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    run_ranks(2, save_steps, tmp_path, [1, 2, 3, 4], 2)
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (state(0.0, rows=4), r"'model.weight' has shape \[3, 2\], the model has \[4, 2\]"),
        (state(0.0) | {"model.bias": torch.zeros(2)}, "has no 'model.bias'"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_tensor(
    other: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    run_ranks(1, save_steps, tmp_path, [1], 2)
    with pytest.raises(CheckpointError, match=message):
        run_ranks(1, load_newest, tmp_path, other)


class FullDisk(dcp.FileSystemWriter):
    """Fails as a disk does that is full."""

    def write_data(self, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        raise OSError(28, "No space left on device")


def save_on_full_disk(world: World, folder: Path, victim: int) -> str:
    kind = dcp.FileSystemWriter
    if world.rank == victim:
        dcp.FileSystemWriter = FullDisk  # pyrefly: ignore[bad-assignment]  # in this rank's own process
    try:
        save(folder, 2, state(2.0), {}, world, keep=1)
    except CheckpointError as error:
        return str(error)
    finally:
        dcp.FileSystemWriter = kind  # pyrefly: ignore[bad-assignment]
    return ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_older_checkpoint(
    victim: int, tmp_path: Path
) -> None:
    run_ranks(2, save_steps, tmp_path, [1], 1)
    for message in run_ranks(2, save_on_full_disk, tmp_path, victim):
        assert "No space left on device" in message and "MiB were free" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [1]
