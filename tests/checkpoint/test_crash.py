"""A save may be killed at any call to the file system: the newest checkpoint that is committed then is whole."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.check import check
from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.checkpoint.store import CheckpointError, save
from shoal.resilience.handover import HandOver
from shoal.resilience.saver import saver
from shoal.run import CheckpointPolicy, Run, read_json_lines
from shoal.world import World
from tests.checkpoint.blocks import run_small, small_blocks

KILLED = 77
CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Calls:
    """Counts calls that change files, and at the chosen one does `end` with it half done."""

    def __init__(self, stop_at: int, end: Callable[[], Any]) -> None:
        self.count, self.stop_at, self.end = 0, stop_at, end
        self.log: list[tuple[str, str]] = []

    def note(self, what: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        self.log.append((what, path))
        self.count += 1
        if self.count == self.stop_at:
            half()
            self.end()

    def __enter__(self) -> Calls:
        self._patches = [patch(f"os.{name}", self._counted(name)) for name in CALLS]
        self._patches.append(patch("io.open", self._open(io.open)))
        for entry in self._patches:
            entry.start()
        return self

    def __exit__(self, *_: object) -> None:
        for entry in self._patches:
            entry.stop()

    def _counted(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*words: Any, **keys: Any) -> Any:
            where = str(Path(f"/proc/self/fd/{words[0]}").readlink()) if name == "fsync" else str(words[0])
            self.note(name, where)
            return real(*words, **keys)

        return call

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *words: Any, **keys: Any) -> Any:
            if not {"w", "+"} & set(mode):
                return real(path, mode, *words, **keys)
            self.note("create", str(path))
            return File(real(path, mode, *words, **keys), str(path), self)

        return call


class File:
    """An open file whose writes and flushes are counted."""

    def __init__(self, file: Any, path: str, calls: Calls) -> None:
        self._file, self._path, self._calls = file, path, calls

    def write(self, data: Any) -> int:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._calls.note("write", self._path, half)
        return self._file.write(data)

    def flush(self) -> None:
        self._calls.note("flush", self._path)
        self._file.flush()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def state(step: int) -> dict[str, Tensor]:
    return {"model.weight": torch.full((6, 20), float(step)), "buffer.seen": torch.tensor(float(step))}


def save_step(world: World, folder: Path, step: int) -> None:
    save(folder, step, state(step), {}, world, keep=2)


def save_base(world: World, folder: Path) -> None:
    for step in (4, 6):
        save_step(world, folder, step)


@pytest.fixture(autouse=True, scope="module")
def blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "checkpoints"
    run_small(1, save_base, folder)
    return folder


def assert_whole(folder: Path, newest_is_one_of: set[int]) -> None:
    """Every checkpoint that is listed is whole and of one step, and the newest is no older than it must be."""
    good, _ = list_checkpoints(folder)
    assert good and good[-1].step in newest_is_one_of
    for checkpoint in good:
        assert check(checkpoint).damage == []
        assert all(bool((tensor == checkpoint.step).all()) for _, tensor in whole_tensors(checkpoint))


@contextmanager
def ranks_write(world: World, folder: Path) -> Generator[Callable[[int], None]]:
    """What saves a step."""
    yield lambda step: save_step(world, folder, step)


@contextmanager
def launcher_writes(world: World, folder: Path) -> Generator[Callable[[int], None]]:
    """The same, handed over; the first save, which plans, is done with."""
    run = Run(folder.parent)
    policy = CheckpointPolicy(every=1, keep=2)
    with saver(run, policy, 1, deadline_s=20.0, hurry=lambda: False, say=lambda text: None) as saves:
        assert saves is not None
        hand_over = HandOver(saves.ways[0], world)

        def save(step: int) -> None:
            assert hand_over.take(step, state(step), {}, time.monotonic(), keep=2)
            hand_over.wait()
            *_, last = read_json_lines(run.events_file)
            if last["event"] == "save failed":
                raise CheckpointError(last["reason"])

        save(6)
        yield save


WRITERS = {"the ranks": ranks_write, "the launcher": launcher_writes}


def killed_at(world: World, folder: Path, step: int, stop_at: int, writer: str) -> bool:
    """Save in a child that is killed at a call; returns whether it came so far."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with WRITERS[writer](world, folder) as save_one, Calls(stop_at, lambda: os._exit(KILLED)):
                save_one(step)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED)
    return code == KILLED


def kill_everywhere(world: World, folder: Path, base: Path, step: int, writer: str) -> int:
    stop_at = 0
    while True:
        stop_at += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        was_killed = killed_at(world, folder, step, stop_at, writer)
        assert_whole(folder, {6, step})
        if not was_killed:
            break
        save_step(world, folder, step)  # what is left of it is in nobody's way
        assert_whole(folder, {step})
        assert not list(folder.glob("*.tmp")) and not list(folder.glob("*.old"))
    return stop_at - 1


@pytest.mark.parametrize(
    ("step", "writer"),
    [(8, "the ranks"), (6, "the ranks"), (6, "the launcher")],
    ids=["a new step", "the newest step again", "the same by the launcher"],
)
def test_a_kill_at_any_call_leaves_the_newest_committed_checkpoint_whole(
    step: int, writer: str, base: Path, tmp_path: Path
) -> None:
    (points,) = run_small(1, kill_everywhere, tmp_path / "checkpoints", base, step, writer, timeout=250)
    assert points > 30


def kill_one(world: World, folder: Path, victim: int, stop_at: int) -> None:
    if world.rank != victim:
        save_step(world, folder, 8)
        return
    with Calls(stop_at, lambda: os._exit(KILLED)):
        save_step(world, folder, 8)


@pytest.mark.parametrize(("victim", "stop_at"), [(1, 1), (1, 4), (0, 2), (0, 9), (0, 20)])
def test_so_does_a_kill_of_one_rank_of_two(victim: int, stop_at: int, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "checkpoints"))
    with pytest.raises(RuntimeError, match=f"rank {victim} died: exit code {KILLED}"):
        run_small(2, kill_one, folder, victim, stop_at)
    assert_whole(folder, {6, 8})


def fail_everywhere(world: World, aside: Path, base: Path, writer: str) -> int:
    """Each call fails in turn, once, as on a full disk; returns how many saves failed for it."""
    failed, stop_at = 0, 0
    while True:
        stop_at += 1
        folder = aside / str(stop_at) / "checkpoints"
        shutil.copytree(base, folder)
        calls = Calls(stop_at, no_space)
        try:
            with WRITERS[writer](world, folder) as save_one, calls:
                save_one(8)
        except CheckpointError as error:
            assert "No space left on device" in str(error)
            assert_whole(folder, {6})
            assert not list(folder.glob("*.tmp"))
            failed += 1
        assert_whole(folder, {6, 8})
        shutil.rmtree(folder)
        if calls.count < stop_at:
            return failed


def no_space() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_call_that_fails_fails_the_save_and_clears_what_it_wrote(
    writer: str, base: Path, tmp_path: Path
) -> None:
    (failed,) = run_small(1, fail_everywhere, tmp_path, base, writer)
    assert failed > 15


def log_of_a_save(world: World, folder: Path) -> list[tuple[str, str]]:
    with Calls(-1, no_space) as calls:
        save_step(world, folder, 8)
    return calls.log


def test_everything_is_flushed_to_the_disk_before_it_is_relied_upon(base: Path, tmp_path: Path) -> None:
    """A kill does not show this, since the kernel writes on; a power cut would."""
    folder = Path(shutil.copytree(base, tmp_path / "checkpoints")).resolve()
    (log,) = run_small(1, log_of_a_save, folder)
    aside = f"{folder}/step-00000008.tmp"
    committed = log.index(("rename", aside))
    for kind, path in log[:committed]:
        if kind == "create":
            writes = [at for at, entry in enumerate(log) if entry == ("write", path)]
            assert max(writes) < log.index(("fsync", path)) < committed, path
    assert log[committed - 1][0] == "open" or ("fsync", aside) in log[:committed]
    assert log.index(("fsync", aside)) > max(at for at, entry in enumerate(log) if entry[0] == "replace")
    after = log[committed:]
    flushed = after.index(("fsync", str(folder)))
    assert all(
        kind not in ("unlink", "rmdir") for kind, _ in after[:flushed]
    )  # nothing older goes before that
