"""What is handed over is the state as it was, however the ranks go on; on GPUs also what passes after the next update."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.resilience.copies import ALL, first_aside
from shoal.resilience.handover import HandOver
from shoal.world import World, join_world
from tests.resilience.test_saver import saver_of

MIB = 1 << 20


@pytest.mark.parametrize(
    ("late", "room", "first"),
    [(0, 100, 4), (1, 100, 3), (8, 100, 3), (9, 100, 2), (1000, 1000, 0), (9, 8, 3), (9, 7, 4)],
)
def test_the_last_tensors_are_copied_on_the_device_as_far_as_there_is_room(
    late: int, room: int, first: int
) -> None:
    assert first_aside([16, 8, 8, 8], late, room) == first


def state_of(step: int, device: str) -> dict[str, Tensor]:
    """64 MiB on the device, a buffer there, and what stays on the host."""
    numbers = torch.arange(8 * MIB // 4, dtype=torch.float32)
    found = {f"model.{n}": (numbers + 1000 * n + step).to(device) for n in range(8)}
    return found | {"buffer.seen": torch.full((3,), step, device=device), "optimizer.kept": numbers + step}


def hand_over_and_go_on(folder: Path, world: World, in_time: int) -> tuple[int, int]:
    """Save after steps 1 and 2 and change the state at once; returns the bytes that passed in time and those on the device."""
    device = world.device.type
    with saver_of(folder, 1) as made:
        saves, state = HandOver(made.ways[0], world), state_of(1, device)
        for step in (1, 2):
            if step == 2:
                assert saves._copies is not None
                saves._copies._in_time = in_time
            before = _most_held(device)
            assert saves.take(step, state, {}, time.monotonic(), keep=2)
            held = _most_held(device) - before  # they may be gone again by now
            saves.before_update()
            for tensor in state.values():
                tensor.add_(1)
            saves.wait()
        assert saves._copies is not None
        return saves._copies._in_time, held


def _most_held(device: str) -> int:
    """Of a GPU's memory since this was asked last."""
    if device == "cpu":
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def assert_as_they_were(folder: Path) -> None:
    found = list_checkpoints(folder / "checkpoints")[0]
    assert [checkpoint.step for checkpoint in found] == [1, 2]
    for checkpoint in found:
        loaded, expected = dict(whole_tensors(checkpoint)), state_of(checkpoint.step, "cpu")
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), checkpoint.step


def test_what_is_handed_over_does_not_change_with_what_comes_after(tmp_path: Path) -> None:
    with join_world(rank=0, size=1, device="cpu") as world:
        assert hand_over_and_go_on(tmp_path, world, ALL) == (ALL, 0)
    assert_as_they_were(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_time", [ALL, 20 * MIB, 0])
def test_on_a_gpu_an_update_waits_for_no_more_than_has_no_copy_on_the_device(
    tmp_path: Path, in_time: int
) -> None:
    with join_world(rank=0, size=1, device="cuda") as world:
        _, held = hand_over_and_go_on(tmp_path, world, in_time)
    assert_as_they_were(tmp_path)
    late = max(0, 64 * MIB - in_time)
    assert late <= held <= late + 8 * MIB + MIB
