"""Whatever is not as it was written is found before it is used, named by file and tensor, and the checkpoint before is taken."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shoal.checkpoint.check import check
from shoal.checkpoint.folder import CheckpointError, inspect, list_checkpoints
from shoal.checkpoint.layout import HEADER_BYTES, piece_bytes, read_index
from shoal.checkpoint.store import load_newest, save
from shoal.plan import Plan
from shoal.world import World
from tests.checkpoint.blocks import run_small, small_blocks

FLIPS, CUTS = {1: 64, 2: 8}, 16
"""a file; flips by ranks"""
OLD, NEW = 4, 8
SHAPES = {
    "model.embedding": (20, 11),
    "model.norm": (24,),
    "optimizer.norm.step": (),
    "buffer.seen": (3, 5),
}


def state(world: World, value: float) -> dict[str, Tensor]:
    """One large tensor in rows, of which each rank's part has two blocks; small ones on every rank."""
    mesh = world.mesh(Plan(shard=world.size))["shard"]
    made = {name: torch.full(shape, value) for name, shape in SHAPES.items()}
    made["model.embedding"] = distribute_tensor(made["model.embedding"], mesh, [Shard(0)])
    made["buffer.seen"] = distribute_tensor(made["buffer.seen"], mesh, [Replicate()])
    return made


def save_two(world: World, folder: Path) -> None:
    for step in (OLD, NEW):
        save(folder, step, state(world, float(step)), {"job": {}}, world, keep=2)


@pytest.fixture(autouse=True, scope="module")
def blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    run_small(2, save_two, folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "checkpoints"))


def newest_of(path: Path) -> Path:
    return path / f"step-{NEW:08d}"


def owner(path: Path, file: str, at: int) -> str:
    """The tensor that a byte belongs to, or none, as in a header."""
    found = inspect(path)
    assert not isinstance(found, tuple) or hasattr(found, "manifest"), found
    for name, stored in read_index(found).items():  # pyrefly: ignore
        for piece in stored.pieces:
            if piece.file == file and piece.at <= at < piece.at + piece_bytes(piece, stored.dtype):
                return name
    return ""


@contextmanager
def flipped(file: Path, at: int, bit: int) -> Generator[None]:
    flip(file, at, bit)
    yield
    flip(file, at, bit)


def flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ (1 << bit)]))


def loaded(world: World, folder: Path) -> tuple[int, str]:
    """The step that a run would go on from, and what it refused; every tensor is that step's."""
    tensors = state(world, -1.0)
    found, refused = load_newest(folder, lambda: tensors, world, accept=lambda _: None)
    assert found is not None
    for name, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyrefly: ignore
        assert bool((local == float(found.step)).all()), name
    return found.step, "; ".join(entry.reason for entry in refused)


def restore(world: World, folder: Path) -> None:
    aside = newest_of(folder).with_suffix(".damaged")
    if world.is_main and aside.exists():
        aside.rename(newest_of(folder))
    world.barrier("restored")


def flip_many(world: World, folder: Path, files: list[str]) -> int:
    """Flip bits one by one; each time all ranks must take the older checkpoint and say where the damage is."""
    draw = random.Random(0)
    count = 0
    for name in files:
        size = (newest_of(folder) / name).stat().st_size
        places = [draw.randrange(size) for _ in range(FLIPS[world.size])]
        if name.endswith(".bin"):
            places += [draw.randrange(HEADER_BYTES) for _ in range(8)] + [size - 1]
        world.barrier("the file before is as it was")
        owners = [owner(newest_of(folder), name, at) if name.endswith(".bin") else "" for at in places]
        for at, lost in zip(places, owners, strict=True):
            bit = draw.randrange(8)  # by all ranks, or the next file's places would differ
            world.barrier("before")
            with flipped(newest_of(folder) / name, at, bit) if world.is_main else ExitStack():
                world.barrier("flipped")
                step, reason = loaded(world, folder)
                restore(world, folder)
            assert step == OLD, f"byte {at} of {name}"
            assert name in reason or name == "COMMIT", reason
            assert repr(lost) in reason or not lost, reason
            count += 1
    return count


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_flipped_bit_in_any_file_is_found_by_all_ranks_and_named(ranks: int, folder: Path) -> None:
    files = sorted(path.name for path in newest_of(folder).iterdir())
    assert files == ["COMMIT", "index.json", "manifest.json", "rank-00000.bin", "rank-00001.bin"]
    counts = run_small(ranks, flip_many, folder, files, timeout=280)
    assert set(counts) == {5 * FLIPS[ranks] + 2 * 9}


def cut_many(world: World, folder: Path) -> None:
    draw = random.Random(1)
    for file in sorted(newest_of(folder).iterdir()):
        whole = file.read_bytes()
        for size in [0, len(whole) - 1] + [draw.randrange(len(whole)) for _ in range(CUTS)]:
            lost = owner(newest_of(folder), file.name, size) if file.suffix == ".bin" else ""
            file.write_bytes(whole[:size])
            step, reason = loaded(world, folder)
            restore(world, folder)
            assert step == OLD and (file.name in reason or file.name == "COMMIT"), reason
            assert repr(lost) in reason or not lost, reason
            file.write_bytes(whole)


def test_a_file_that_is_cut_anywhere_is_found_and_named(folder: Path) -> None:
    run_small(1, cut_many, folder)


def load_and_tell(world: World, folder: Path) -> tuple[int, str]:
    return loaded(world, folder)


def remove_each(world: World, folder: Path, files: list[str]) -> list[tuple[str, int, str]]:
    found = []
    for name in files:
        path = newest_of(folder) / name
        content = path.read_bytes()
        world.barrier("read")
        if world.is_main:
            path.unlink()
        world.barrier("removed")
        found.append((name, *loaded(world, folder)))
        restore(world, folder)
        if world.is_main:
            path.write_bytes(content)
        world.barrier("written")
    return found


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    files = sorted(path.name for path in newest_of(folder).iterdir())
    for by_rank in run_small(2, remove_each, folder, files):
        assert [name for name, _, _ in by_rank] == files
        for name, step, reason in by_rank:
            assert step == OLD and name in reason


def save_again(world: World, folder: Path) -> None:
    save(folder, NEW, state(world, 9.0), {"job": {}}, world, keep=2)


@pytest.mark.parametrize("other_step", [True, False], ids=["of another step", "of another save of the step"])
def test_a_file_of_another_save_is_found(other_step: bool, folder: Path, tmp_path: Path) -> None:
    if not other_step:
        run_small(2, save_again, tmp_path / "again")
    source = folder / f"step-{OLD:08d}" if other_step else newest_of(tmp_path / "again")
    shutil.copy(source / "rank-00001.bin", newest_of(folder) / "rank-00001.bin")
    for step, reason in run_small(2, load_and_tell, folder):
        assert step == OLD
        assert "rank-00001.bin: tensor 'model." in reason and "it is of another save" in reason


def test_files_of_one_save_that_were_exchanged_are_found(folder: Path) -> None:
    one, two = (newest_of(folder) / f"rank-0000{rank}.bin" for rank in (0, 1))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second.ljust(len(first), b"\0")[: len(first)])
    two.write_bytes(first.ljust(len(second), b"\0")[: len(second)])
    for step, reason in run_small(2, load_and_tell, folder):
        assert step == OLD and "rank 1 of 2, expected" in reason


def test_a_damaged_checkpoint_is_set_aside_and_one_that_is_whole_is_not(folder: Path) -> None:
    flip(newest_of(folder) / "rank-00000.bin", 300, 3)
    run_small(1, load_and_tell, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000008.damaged"]
    run_small(1, load_and_tell, folder)
    assert [found.step for found in list_checkpoints(folder)[0]] == [OLD]


def test_without_any_that_is_whole_all_ranks_say_so_and_nothing_is_moved(folder: Path) -> None:
    with (
        flipped(newest_of(folder) / "rank-00000.bin", 300, 3),
        flipped(folder / f"step-{OLD:08d}" / "rank-00001.bin", 300, 3),
    ):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* rank-00000\.bin.* rank-00001\.bin"):
            run_small(2, load_and_tell, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000008"]


def no_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("unpickled")


class NoPickle(pickle.Unpickler):
    def load(self) -> Any:
        raise AssertionError("unpickled")


def load_without_pickle(world: World, folder: Path) -> tuple[int, str]:
    with ExitStack() as stack:
        for target in ("pickle.loads", "pickle.load", "torch.load", "pickle.Unpickler"):
            stack.enter_context(patch(target, NoPickle if target.endswith("r") else no_pickle))
        stack.enter_context(patch("torch.distributed.distributed_c10d._unpickler", NoPickle))
        with pytest.raises(AssertionError, match="unpickled"):  # the patches do what they should
            dist.all_gather_object([None] * world.size, 1)
        with pytest.raises(AssertionError, match="unpickled"):
            torch.load(io.BytesIO(b""))
        return loaded(world, folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_unpickled_on_the_way_in(ranks: int, folder: Path) -> None:
    assert {step for step, _ in run_small(ranks, load_without_pickle, folder)} == {NEW}


def test_a_checkpoint_with_pickles_is_not_opened(folder: Path) -> None:
    """Format 1 had them. This one would do harm."""
    path = newest_of(folder)
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": NEW, "files": {}, "tensors": {}}))
    (path / "COMMIT").write_text("")
    step, reason = run_small(1, load_and_tell, folder)[0]
    assert step == OLD and "format 1" in reason and not Path("harmed").exists()


def test_an_index_that_names_a_file_elsewhere_is_refused(folder: Path) -> None:
    """Whoever can write the folder can make all checksums fit; no file but the checkpoint's own is read even then."""
    from shoal.checkpoint.folder import commit

    path = newest_of(folder)
    manifest = json.loads((path / "manifest.json").read_text())
    text = (path / "index.json").read_text().replace("rank-00000.bin", "../../../secret.bin")
    aside = path.rename(path.with_suffix(".tmp"))
    (aside / "index.json").write_text(text)
    import hashlib

    manifest |= {"index_sha256": hashlib.sha256(text.encode()).hexdigest()}
    for name in ("manifest.json", "COMMIT"):
        (aside / name).unlink()
    commit(aside, manifest)
    assert "'../../../secret.bin'" in check(inspect(path)).damage[0]
    step, reason = run_small(1, load_and_tell, folder)[0]
    assert step == OLD and "secret" in reason


def test_a_check_finds_every_damage_at_once(folder: Path) -> None:
    path = newest_of(folder)
    assert check(inspect(path)).damage == []
    with flipped(path / "rank-00000.bin", 300, 3), flipped(path / "rank-00001.bin", 70, 3):
        damage = check(inspect(path)).damage
    assert (
        len(damage) == 2 and damage[0].startswith("rank-00000.bin") and damage[1].startswith("rank-00001.bin")
    )
