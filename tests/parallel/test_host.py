"""Numbers come to the host past copies that were asked for before, and nobody else has their memory until then."""

from __future__ import annotations

import gc

import pytest
import torch

from shoal.parallel import host
from shoal.parallel.host import Lane, Mail

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_a_cpu_numbers_are_there_and_have_no_clock() -> None:
    mail = Mail()
    first, second = mail.send(torch.tensor([1.5, -2.0])), mail.send(torch.tensor([[3, 4], [5, 6]]))
    assert first.read() == [1.5, -2.0] and second.read() == [[3, 4], [5, 6]]
    assert second.seconds_after(first) is None


def test_numbers_of_a_type_that_would_be_misread_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.bfloat16 cannot be sent"):
        Mail().send(torch.ones(3, dtype=torch.bfloat16))


def test_memory_is_locked_piece_by_piece_until_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    pauses: list[float] = []

    def lock(piece: torch.Tensor, device: torch.device, of: torch.Tensor | None = None) -> int:
        locked.append(len(piece))
        return 2 if len(locked) == 3 else 0

    monkeypatch.setattr(host, "PIECE", 10)
    monkeypatch.setattr(host, "lock_in_place", lock)
    memory, device = torch.empty(35, dtype=torch.uint8), torch.device("cuda", 0)
    assert host.lock_in_pieces(memory[:15], device, pauses.append) == 0
    assert locked == [10, 5] and len(pauses) == 2
    assert host.lock_in_pieces(memory, device, pauses.append) == 2
    assert locked == [10, 5, 10] and len(pauses) == 2


@ON_A_GPU
@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([0.1, float("inf"), -3e30], torch.float32),
        ([0.1, float("-inf"), 1e300], torch.float64),
        ([-(2**62) - 1, 7], torch.int64),
        ([-(2**31), 7], torch.int32),
    ],
)
def test_on_a_gpu_numbers_arrive_as_they_are(numbers: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor(numbers, dtype=dtype, device="cuda")
    assert Mail().send(values).read() == values.cpu().tolist()


@ON_A_GPU
def test_on_a_gpu_numbers_pass_copies_that_were_asked_for_before() -> None:
    device = torch.device("cuda", 0)
    source = torch.ones(1 << 28, device=device)  # 1 GiB, which takes 20 ms
    target = torch.empty(1 << 28, pin_memory=True)
    mail = Mail()
    mail.send(torch.zeros(1, device=device)).read()  # the kernel is loaded
    with Lane(device).run():
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    assert mail.send(torch.full((3,), 2.0, device=device)).read() == [2.0, 2.0, 2.0]
    assert not copied.query()
    copied.synchronize()


@ON_A_GPU
def test_on_a_gpu_memory_of_numbers_nobody_waits_for_is_not_given_to_others() -> None:
    device, mail = torch.device("cuda", 0), Mail()
    values = torch.full((64,), 5.0, device=device)
    torch.cuda._sleep(200_000_000)  # 0.1 s
    mail.send(values)  # let go of at once
    gc.collect()
    others = [torch.zeros(64, pin_memory=True) for _ in range(100)]
    torch.cuda.synchronize()
    assert all(not other.any() for other in others)
    assert mail.send(values).read() == [5.0] * 64
