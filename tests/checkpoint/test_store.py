"""A checkpoint holds all that training needs, is refused where it does not fit, and a failed write leaves nothing behind."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.layout import Damage, read_index
from shoal.checkpoint.plain import export_plain
from shoal.checkpoint.read import Block, Files
from shoal.checkpoint.store import CheckpointError, load, model_state, newest, save
from shoal.plan import Plan
from shoal.train.setup import transient_of_all
from shoal.world import World
from tests.checkpoint.blocks import small_blocks
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


def test_only_tensors_are_saved(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'loader\.position' is of type int, and a checkpoint holds only tensors"
    ):
        run_ranks(2, save_this, tmp_path, state(1.0) | {"loader.position": 7})


def save_this(world: World, folder: Path, what: dict[str, Tensor]) -> None:
    save(folder, 1, what, {}, world, keep=2)


def save_on_full_disk(world: World, folder: Path, victim: int, when: str) -> str:
    full = {
        "as it is written": patch(
            "shoal.checkpoint.parts._write_part", side_effect=OSError(28, "No space left on device")
        ),
        "before": patch("shutil.disk_usage", return_value=shutil._ntuple_diskusage(2**30, 2**30 - 100, 100)),
    }[when]
    try:
        with full if world.rank == victim else nullcontext():
            save(folder, 2, state(2.0), {}, world, keep=2)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("victim", "when"), [(0, "as it is written"), (1, "as it is written"), (0, "before")]
)
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_older_checkpoint(
    victim: int, when: str, tmp_path: Path
) -> None:
    run_ranks(2, save_steps, tmp_path, [1], 2)
    needed = 2 * 64 + 3 * 2 * 4 + 4  # two headers, a matrix, a number
    for message in run_ranks(2, save_on_full_disk, tmp_path, victim, when):
        assert "No space left on device" in message and f"it needs {needed} bytes" in message
        assert "100 bytes (0.0 MiB) were free" in message or when != "before"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert [found.step for found in list_checkpoints(tmp_path)[0]] == [1]


AWKWARD = {
    "a.number": torch.tensor(3, dtype=torch.int64),
    "b.byte": torch.tensor([True, False, True]),
    "c.half": torch.arange(5, dtype=torch.bfloat16),
    "d.double": torch.arange(6, dtype=torch.float64).view(2, 3).T,  # not contiguous
    "e.empty": torch.zeros(0, 4),
    "f.complex": torch.randn(3, dtype=torch.complex64),
    "g.eighth": torch.randn(7).to(torch.float8_e4m3fn),
    "h.large": torch.arange(3 * 2**20 + 5, dtype=torch.int32),  # of several blocks, the last one short
}


def save_and_load(world: World, folder: Path) -> bool:
    save(folder, 1, dict(AWKWARD), {}, world, keep=2)
    found = {name: torch.empty_like(tensor) for name, tensor in AWKWARD.items()}
    load_newest(world, folder, found)
    return all(
        torch.equal(
            found[n].view(torch.uint8) if t.dtype.itemsize == 1 else found[n],
            t.view(torch.uint8) if t.dtype.itemsize == 1 else t,
        )
        for n, t in AWKWARD.items()
    )


def test_tensors_of_every_kind_come_back_to_the_bit_and_lie_where_their_type_may(tmp_path: Path) -> None:
    assert run_ranks(1, save_and_load, tmp_path) == [True]
    checkpoint = list_checkpoints(tmp_path)[0][0]
    for stored in read_index(checkpoint).values():
        assert all(piece.at % stored.dtype.itemsize == 0 for piece in stored.pieces)


WHOLE = {
    f"model.{number}": torch.randn(shape)
    for number, shape in enumerate([(), (0, 3), (1,), (7,), (640, 4), (50, 3, 7), (333, 1), (1, 2, 300)])
}


def load_by_threads(world: World, folder: Path) -> tuple[bool, int, int]:
    """Whether all came back; how many read side by side, and how many bytes."""
    read = Files.read
    asked: list[tuple[Files, int]] = []

    def noted(files: Files, block: Block, into: memoryview) -> Damage | None:
        asked.append((files, block.size))
        return read(files, block, into)

    # rows of 84 and 16 bytes, of which parts hold as many as fit, and of 1,200; blocks of 256 bytes and parts of 512
    with (
        small_blocks(),
        patch("shoal.checkpoint.store._threads", return_value=3),
        patch.object(Files, "read", noted),
    ):
        save(folder, 1, dict(WHOLE), {}, world, keep=1)
        found = load_newest(world, folder, {name: torch.full_like(t, -1.0) for name, t in WHOLE.items()})
    equal = all(torch.equal(found[name], tensor) for name, tensor in WHOLE.items())
    return equal, len({id(files) for files, _ in asked}), sum(size for _, size in asked)


def test_one_file_is_read_in_parts_by_several_threads(tmp_path: Path) -> None:
    ((equal, readers, size),) = run_ranks(1, load_by_threads, tmp_path)
    assert equal and readers == 3
    whole = sum(tensor.nbytes for tensor in WHOLE.values())
    assert whole <= size < 2 * whole  # what parts of a block share is read for each of them


class Turned(nn.Module):
    """With a buffer that its state_dict has, and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def save_and_export(world: World, folder: Path) -> tuple[str, ...]:
    model = nn.ModuleDict({f"stage{world.rank}": Turned()})
    transient = transient_of_all(model, Plan(pipeline=2), world)
    save(folder / "saved", 1, model_state(model), {"transient": transient}, world, keep=1)
    if world.is_main:
        checkpoint = list_checkpoints(folder / "saved")[0][0]
        export_plain(checkpoint, folder / "weights.pt", weights=True)
        export_plain(checkpoint, folder / "all.pt", weights=False)
    return transient


def test_buffers_that_no_state_dict_has_are_saved_and_left_out_of_exported_weights(tmp_path: Path) -> None:
    for transient in run_ranks(2, save_and_export, tmp_path):
        assert transient == ("buffer.stage0.angles", "buffer.stage1.angles")
    whole = nn.ModuleDict({"stage0": Turned(), "stage1": Turned()})
    whole.load_state_dict(torch.load(tmp_path / "weights.pt"))  # no name too many, and none too few
    assert set(torch.load(tmp_path / "all.pt")) == set(model_state(whole))
