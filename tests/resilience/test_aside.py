"""Copies on the device get what steps leave of it: here of a device whose allocator is said."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shoal.resilience import aside as module
from shoal.resilience.aside import Aside


class Device:
    """Of 1,000 bytes, of which torch has some."""

    def __init__(self) -> None:
        self.reserved, self.most, self.freed = 300, 300, 0
        self.asked: list[int] = []

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 1000 - self.reserved, 1000

    def max_memory_reserved(self, device: object) -> int:
        return self.most

    def memory_reserved(self, device: object) -> int:
        return self.reserved

    def memory_stats(self, device: object) -> dict[str, int]:
        return {"reserved_bytes.all.freed": self.freed}

    def empty(self, size: int, **_: object) -> Tensor:
        self.asked.append(size)
        self.reserved += size
        self.most = max(self.most, self.reserved)
        return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def device() -> Generator[Device]:
    found = Device()
    lane = SimpleNamespace(run=nullcontext)
    names = ("mem_get_info", "max_memory_reserved", "memory_reserved", "memory_stats")
    with (
        patch.multiple(torch.cuda, **{name: getattr(found, name) for name in names}),
        patch.object(module, "Lane", lambda _: lane),
        patch.object(module, "sizes_of", lambda sources: [source.nbytes for source in sources]),
        patch.object(torch, "empty", found.empty),
    ):
        yield found


def sources(*sizes: int) -> list[Tensor]:
    return [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]


def test_room_is_kept_for_as_much_as_steps_leave(device: Device) -> None:
    device.reserved, device.most = 500, 650  # of which torch has given some back
    Aside(torch.device("cuda")).keep_room([100, 50, 200])
    assert device.asked == [200, 50]  # 100 more would be over 1000 - 650 - 50
    assert device.reserved == 750


def test_what_is_kept_is_room_and_no_need_of_steps(device: Device) -> None:
    aside, state = Aside(torch.device("cuda")), sources(100, 50, 200)
    device.reserved = device.most = 600
    aside.keep_room([100, 50, 200])
    assert device.reserved == device.most == 950
    found = aside.take(state, late=350)
    assert sorted(found) == [0, 1, 2]  # 1000 - 600 - 50 are room
    assert all(torch.equal(found[number], state[number]) for number in found)
    assert aside.copies == list(found.values())


def test_what_torch_gave_back_for_steps_is_kept_no_longer(device: Device) -> None:
    aside, state = Aside(torch.device("cuda")), sources(100, 50, 200)
    aside.keep_room([100, 50, 200])
    device.most, device.reserved = (
        950,
        700,
    )  # steps came to need 700, beside which all that was kept had no room
    device.freed += 350
    assert sorted(aside.take(state, late=350)) == [1, 2]  # 1000 - 700 - 50
    assert sorted(aside.take(state, late=350)) == [1, 2]


def test_what_torch_gave_back_while_copies_were_in_use_is_no_need_of_steps(device: Device) -> None:
    aside, state = Aside(torch.device("cuda")), sources(100, 50, 200)
    device.most = device.reserved = 400
    assert sorted(aside.take(state, late=350)) == [0, 1, 2]
    device.most = device.reserved = 950  # steps came to need 600 beside the copies
    device.freed += 30
    aside.let_go()
    assert aside.copies == []
    assert sorted(aside.take(state, late=350)) == [0, 1, 2]  # 1000 - 600 - 50


def test_where_nothing_was_kept_the_peak_is_what_steps_need(device: Device) -> None:
    aside, state = Aside(torch.device("cuda")), sources(100, 50, 200)
    device.most, device.reserved, device.freed = 850, 600, 250  # as after steps that were recorded
    assert sorted(aside.take(state, late=350)) == [1]  # 1000 - 850 - 50


def test_where_the_device_has_no_room_nothing_is_copied_on_it(device: Device) -> None:
    aside, state = Aside(torch.device("cuda")), sources(100, 50, 200)
    with patch.object(torch, "empty", side_effect=torch.OutOfMemoryError("full")):
        aside.keep_room([100, 50, 200])
    device.reserved = device.most = 960
    assert aside.take(state, late=350) == {}


@pytest.mark.parametrize(
    "dtypes", [[torch.float32] * 3, [torch.int64, torch.bool, torch.float32], [torch.uint16] * 3]
)
def test_copies_are_made_by_one_call_for_each_width(device: Device, dtypes: list[torch.dtype]) -> None:
    """Those that lie apart by one each."""
    aside, calls, copy_many = Aside(torch.device("cuda")), list[int](), torch._foreach_copy_
    state = [torch.arange(9).to(dtype) for dtype in dtypes] + [torch.arange(12.0).view(3, 4)[:, :2]]

    def noted(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append(len(targets))
        copy_many(targets, sources)

    with patch.object(torch, "_foreach_copy_", noted):
        found = aside.take(state, late=1000)
    assert sorted(calls) == ([3] if len(set(dtypes)) == 1 else [1, 1, 1])
    assert all(found[n].dtype == state[n].dtype and torch.equal(found[n], state[n]) for n in range(4))


def test_on_a_cpu_nothing_is_kept() -> None:
    Aside(torch.device("cpu")).keep_room([100])
