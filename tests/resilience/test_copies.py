"""What is handed over is the state as it was, however the ranks go on; on GPUs also what passes after the next update."""

from __future__ import annotations

import itertools
import time
import weakref
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.parallel.host import PIECE
from shoal.resilience import aside, copies
from shoal.resilience.aside import Aside, set_aside
from shoal.resilience.copies import in_pieces
from shoal.resilience.handover import SETTLED, HandOver
from shoal.resilience.passing import ALL, GROUP, Pair, Passing, passes_in
from shoal.world import World, join_world
from tests.resilience.test_saver import saver_of

MIB = 1 << 20
PARTS, MASK = 8, "buffer.mask"
"""tensors that the update writes; a buffer of one byte an element, which is last in the file"""
EACH = {"cpu": MIB, "cuda": 32 * MIB}
"""bytes of each of them: on a GPU so many that passing takes longer than asking for it"""


@pytest.mark.parametrize(
    ("late", "room", "chosen"),
    [
        (0, 100, []),
        (1, 100, [3]),
        (9, 100, [3, 2]),
        (1000, 1000, [3, 2, 1, 0]),
        (9, 20, [3, 2]),
        (9, 15, [3]),  # and what is left of the room holds no other
        (30, 20, [3, 1]),  # the large one is left out, not the one before it
    ],
)
def test_the_last_tensors_are_copied_on_the_device_as_far_as_there_is_room(
    late: int, room: int, chosen: list[int]
) -> None:
    sizes = [9, 8, 16, 8] if late == 30 else [16, 8, 8, 8]
    assert set_aside(sizes, late, room) == chosen


def test_what_passes_in_time_is_told_by_how_long_all_of_it_took() -> None:
    assert passes_in(1.0, 2.0, 1000) == 450
    assert passes_in(0.0, 2.0, 1000) == 0
    assert passes_in(0.0, 0.0, 1000) == ALL  # nothing was on the device


@pytest.mark.parametrize(
    ("at", "size", "cut"),
    [
        (0, 5, [(5, 0)]),
        (PIECE - 4, 4, [(4, 0)]),
        (PIECE - 4, 10, [(4, 0), (6, 4)]),
        (PIECE, 3, [(3, 0)]),
        (7, 2 * PIECE, [(PIECE - 7, 0), (PIECE, PIECE - 7), (7, 2 * PIECE - 7)]),
    ],
)
def test_a_copy_reaches_from_no_locked_piece_into_the_next(
    at: int, size: int, cut: list[tuple[int, int]]
) -> None:
    place = torch.empty(size, dtype=torch.uint8)
    found = list(in_pieces(place, at))
    assert [(len(part), begin) for part, begin in found] == cut
    assert all(part.data_ptr() == place.data_ptr() + begin for part, begin in found)


def state_of(step: int, device: str) -> dict[str, Tensor]:
    """Eight tensors on the device, buffers there, and what stays on the host."""
    numbers = torch.arange(EACH[device] // 4, dtype=torch.float32)
    found = {f"model.{n}": (numbers + 1000 * n + step).to(device) for n in range(PARTS)}
    found[MASK] = torch.full((EACH[device],), step == 1, device=device)
    return found | {"optimizer.kept": numbers[:100] + step}


def hand_over_and_go_on(folder: Path, world: World, in_time: int) -> tuple[int, int]:
    """Save after steps 1 and 2 and change the state at once; returns the bytes that passed in time and those on the device."""
    device = world.device.type
    with saver_of(folder, 1) as made:
        saves, state = HandOver(made.ways[0], world), state_of(1, device)
        for step in (1, 2):
            if step == 2:
                assert saves._copies is not None
                saves._copies._in_time = in_time
            before = _held(device)
            assert saves.take(step, state, {}, time.monotonic(), keep=2)
            held = torch.cuda.max_memory_allocated() - before if before else 0  # it may be gone again by now
            # where the device takes memory of what was let go of
            torch.full((EACH[device],), 7, dtype=torch.uint8, device=device)
            saves.before_update()
            for name, tensor in state.items():
                tensor.logical_not_() if name == MASK else tensor.add_(1)
            saves.wait()
        assert saves._copies is not None
        return saves._copies._in_time, held


def _held(device: str) -> int:
    """Of a GPU's memory; the peak begins anew."""
    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def assert_as_they_were(folder: Path, device: str) -> None:
    found = list_checkpoints(folder / "checkpoints")[0]
    assert [checkpoint.step for checkpoint in found] == [1, 2]
    for checkpoint in found:
        loaded = dict(whole_tensors(checkpoint))
        expected = {name: tensor.cpu() for name, tensor in state_of(checkpoint.step, device).items()}
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()), checkpoint.step


def test_what_is_handed_over_does_not_change_with_what_comes_after(tmp_path: Path) -> None:
    with join_world(rank=0, size=1, device="cpu") as world:
        assert hand_over_and_go_on(tmp_path, world, ALL) == (ALL, 0)
    assert_as_they_were(tmp_path, "cpu")


class OnDevice(Tensor):
    """In host memory, and says that it is not."""

    is_cuda = property(lambda self: True)  # pyrefly: ignore[bad-override]


class Moment:
    """An event of a device that does everything at once, a millisecond each."""

    _clock = itertools.count()

    def __init__(self, **_: bool) -> None:
        self.at = -1

    def record(self) -> None:
        self.at = next(self._clock)

    def query(self) -> bool:
        return self.at >= 0

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Moment) -> float:
        return float(later.at - self.at)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """What is called of a GPU is there, of 1 GiB, which torch has a quarter of; the devices that threads have chosen."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 28, 1 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 1 << 28)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 28)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
    monkeypatch.setattr(aside, "Lane", lambda _: SimpleNamespace(run=nullcontext, on=nullcontext))
    monkeypatch.setattr(copies, "lock_in_pieces", lambda memory, device, pause: 0)
    monkeypatch.setattr(copies, "PIECE", 4096)
    return chosen


@pytest.mark.parametrize("direct", [0, 1, GROUP, 1000, 3000])
def test_copies_are_asked_for_as_others_get_done(monkeypatch: pytest.MonkeyPatch, direct: int) -> None:
    asked, done, most, least = list[int](), 0, 0, GROUP

    class Mark(Moment):
        def record(self) -> None:
            self.at = len(asked)

        def synchronize(self) -> None:
            nonlocal done, least
            done = self.at
            if len(asked) < 3000:
                least = min(least, len(asked) - done)  # which the device is at meanwhile

    def copied(places: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        nonlocal most
        assert non_blocking and len(places) == len(sources)
        asked.extend(len(source) for source in sources)  # which tells them apart
        most = max(most, len(asked) - done)

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    parts = [torch.empty(number, dtype=torch.uint8) for number in range(3000)]
    passing = Passing()
    passing.ask([(part, part) for part in parts[:direct]], [(part, part) for part in parts[direct:]], parts)
    assert passing.asked_for.is_set() == (direct <= GROUP)
    assert done == 0 and len(asked) <= 2 * GROUP
    passing.ask_for_rest()
    assert asked == list(range(3000)) and most <= 2 * GROUP and least > 0
    assert passing.asked_for.is_set() and passing.released.at == direct and passing.copied.at == 3000  # pyrefly: ignore


@pytest.mark.usefixtures("pretended")
def test_what_is_read_stays_until_all_is_copied() -> None:
    """What is copied aside as well: its copy on the device may not have been made yet."""
    sources = [torch.arange(9) + number for number in range(4)]
    alive = [weakref.ref(source) for source in sources]
    places, passing = [torch.empty(9, dtype=torch.int64) for _ in sources], Passing()
    passing.ask([(places[0], sources[0])], [(places[1], sources[1].clone())], sources)
    del sources
    assert all(reference() is not None for reference in alive)
    passing.ask_for_rest()
    assert all(reference() is None for reference in alive)
    assert torch.equal(places[1], torch.arange(9) + 1)


@pytest.mark.parametrize("early", [True, False], ids=["beside the steps", "at the first save"])
def test_what_is_on_a_device_comes_by_pieces_and_in_two_parts(
    pretended: list[torch.device], tmp_path: Path, early: bool
) -> None:
    plain = {
        "model.a": torch.arange(5000.0),
        "model.b": torch.arange(6000.0).view(60, 100).t(),
        "model.one": torch.tensor(3.5),
        "model.half": torch.arange(3001, dtype=torch.bfloat16),
        "model.turned": torch.arange(30.0).view(5, 6).t(),
        "model.single": torch.arange(3.0).as_strided((1, 1), (7, 3)),
        "model.empty": torch.arange(4.0).as_strided((0,), (2,)),
        "optimizer.host": torch.arange(777.0),
        "buffer.mask": torch.arange(4099) % 3 == 0,
    }
    state = {
        name: tensor if name == "optimizer.host" else tensor.as_subclass(OnDevice)
        for name, tensor in plain.items()
    }
    chosen: list[int] = []
    take, kept = Aside.take, list[list[int]]()
    ask, held = Passing.ask, list[int]()

    def asked(self: Passing, direct: list[Pair], later: list[Pair], sources: list[Tensor]) -> None:
        held.append(len(sources))
        ask(self, direct, later, sources)

    def noted(self: Aside, sources: list[Tensor], late: int) -> dict[int, Tensor]:
        found = take(self, sources, late)
        chosen.append(len(found))
        return found

    with (
        saver_of(tmp_path, 1) as made,
        join_world(rank=0, size=1, device="cpu") as world,
        patch.object(world, "device", torch.device("cuda", 3)),
        patch.object(Aside, "take", noted),
        patch.object(Passing, "ask", asked),
        patch.object(Aside, "keep_room", lambda self, sizes: kept.append(sizes)),
        closing(HandOver(made.ways[0], world)) as saves,
    ):
        assert not saves.overlaps
        if early:
            saves.get_ready(state)
            for number in range(SETTLED + 1):
                assert len(kept) == (number >= SETTLED)
                saves.before_update()
            assert [sum(sizes) for sizes in kept] == [
                sum(part.nbytes for part in state.values() if part.is_cuda)
            ]
        for step in (1, 2):
            assert saves.take(step, state, {}, time.monotonic(), keep=2)
            saves.before_update()
            saves.wait()
            assert saves.overlaps and saves.copies == []
            assert saves._copies is not None
            saves._copies._in_time = 30_000
    assert chosen[0] == 7 and 0 < chosen[1] < 7
    assert held == [len(state)] * 2
    assert pretended == [torch.device("cuda", 3)] * 2  # a thread begins with the first device
    found = list_checkpoints(tmp_path / "checkpoints")[0]
    assert [checkpoint.step for checkpoint in found] == [1, 2]
    for checkpoint in found:
        loaded = dict(whole_tensors(checkpoint))
        assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.items())


@pytest.mark.usefixtures("pretended")
def test_an_error_while_copies_are_asked_for_holds_up_no_update(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {"model.a": torch.arange(5000.0).as_subclass(OnDevice)}
    with (
        saver_of(tmp_path, 1) as made,
        join_world(rank=0, size=1, device="cpu") as world,
        patch.object(world, "device", torch.device("cuda", 0)),
        closing(HandOver(made.ways[0], world)) as saves,
    ):
        rest = patch.object(Passing, "ask_for_rest", side_effect=RuntimeError("gone"))
        with rest, patch.object(Passing, "ask", lambda *_: None):
            assert saves.take(1, state, {}, time.monotonic(), keep=2)
            saves.before_update()
            with pytest.raises(RuntimeError, match="gone"):
                saves.wait()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_time", [ALL, 100 * MIB, 0])
def test_on_a_gpu_an_update_waits_for_no_more_than_has_no_copy_on_the_device(
    tmp_path: Path, in_time: int
) -> None:
    each = EACH["cuda"]
    with join_world(rank=0, size=1, device="cuda") as world:
        learned, held = hand_over_and_go_on(tmp_path, world, in_time)
    assert_as_they_were(tmp_path, "cuda")
    assert learned < (PARTS + 1) * each  # the update came at once
    late = max(0, (PARTS + 1) * each - in_time)
    assert late + each <= held <= late + 2 * each + MIB  # the mask is always copied


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("in_time", [ALL, 0])
def test_on_a_gpu_more_copies_than_a_stream_takes_are_as_they_were(tmp_path: Path, in_time: int) -> None:
    state = {f"model.{n}": torch.full((1000,), float(n), device="cuda") for n in range(1500)}
    with (
        join_world(rank=0, size=1, device="cuda") as world,
        saver_of(tmp_path, 1) as made,
        closing(HandOver(made.ways[0], world)) as saves,
    ):
        for step in (1, 2):
            assert saves.take(step, state, {}, time.monotonic(), keep=2)
            saves.before_update()
            for tensor in state.values():
                tensor.add_(1)
            saves.wait()
            assert saves._copies is not None
            saves._copies._in_time = in_time
    for checkpoint in list_checkpoints(tmp_path / "checkpoints")[0]:
        loaded = dict(whole_tensors(checkpoint))
        assert all(loaded[f"model.{n}"].eq(n + checkpoint.step - 1).all() for n in range(1500))
