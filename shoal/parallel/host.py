"""Host memory that a device reads and writes by itself, and copies that run beside its computation.

[Note: memory of copies] The host goes on while a copy runs, so nothing that a copy reads or writes may be given back before it is
done. That is not left to the allocator of device memory: whoever lets go of some makes the stream that it belongs to wait for the
copy first. Pinned memory of torch's own allocator is reused only after the copies that were made of it.

[Note: numbers beside copies] A device's copies to the host are made one after the other, whatever their streams: behind those of
a checkpoint five numbers wait for all of them, and their stream with them (0.3 s in steps of 0.15 on an H200). So numbers are
written into host memory by a kernel, which passes the copies by.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.simulated import is_simulated

PIECE = 1 << 28
"""bytes that are locked at once: it takes 80 ms (3.2 GB/s beside an H200), in which CUDA takes no call of another thread"""


KINDS = {torch.float32: "<f4", torch.float64: "<f8", torch.int32: "<i4", torch.int64: "<i8"}
"""types of numbers that are sent to the host, as numpy writes them"""

Pause = Callable[[float], None]


class Lane:
    """A stream for copies in one direction. Without streams, on a CPU, copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Copies asked for inside begin when the device has done all that it was asked for until now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.on():
            yield

    @contextmanager
    def on(self) -> Iterator[None]:
        """As `run`, without waiting for the stream that is current: for more of the same copies, in any thread."""
        with torch.cuda.stream(self._stream):  # does nothing if there is none
            yield

    def mark(self) -> Mark:
        """What becomes true when all copies that were asked for until now are done."""
        if self._stream is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)


class Mark:
    """A point in the copies of a lane."""

    def __init__(self, event: torch.Event | None = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the stream that is current wait, and not the host."""
        if self._event is not None:
            self._event.wait()


class Sent(NamedTuple):
    """Numbers on their way into host memory."""

    values: Tensor
    arrived: torch.cuda.Event | None = None

    def read(self) -> list[Any]:
        """The numbers; waits for what the device was asked for before them, and for nothing after."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()

    def seconds_after(self, earlier: Sent) -> float | None:
        """From the arrival of earlier ones to that of these, by the device's clock; None on a CPU."""
        if self.arrived is None or earlier.arrived is None:
            return None
        self.arrived.synchronize()
        return earlier.arrived.elapsed_time(self.arrived) / 1000


def nothing_sent(device: torch.device) -> Sent:
    """No numbers, which arrive when the device has done what it was asked for until now: a point in its time."""
    arrived = None
    if device.type == "cuda":
        arrived = torch.cuda.Event(enable_timing=True)
        arrived.record(torch.cuda.current_stream(device))
    return Sent(torch.empty(0), arrived)


class Mail:
    """Sends numbers of a device to the host, past what copies are on their way; see [Note: numbers beside copies]."""

    def __init__(self) -> None:
        self._sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, values: Tensor) -> Sent:
        """Have the device write them into host memory: now, since what is asked for later waits for all before it.

        Raises:
            TypeError: they are not of float32, float64, int32 or int64.
        """
        if values.dtype not in KINDS:
            raise TypeError(
                f"numbers of {values.dtype} cannot be sent to the host; make them one of {list(KINDS)}"
            )
        if not values.is_cuda:
            return Sent(values)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        if is_simulated():
            host.copy_(values, non_blocking=True)
        else:
            torch.mul(values, 1, out=_as_seen_by_device(host))
        arrived = torch.cuda.Event(enable_timing=True)
        arrived.record()
        # torch's allocator of pinned memory does not know that a kernel writes there, and may not have it back before
        while self._sent and self._sent[0][1].query():
            self._sent.popleft()
        self._sent.append((host, arrived))
        return Sent(host, arrived)


class _Seen:
    """Pinned memory for `torch.as_tensor`, which asks CUDA for the device that reaches it."""

    def __init__(self, host: Tensor) -> None:
        self.host = host  # lives as long as what is made of it
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": KINDS[host.dtype],
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def _as_seen_by_device(host: Tensor) -> Tensor:
    return torch.as_tensor(_Seen(host))


def settle(device: torch.device) -> None:
    """Wait, on the host, for all that the device was asked for: copies into host memory are then there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, for good, that `device` can copy to and from without stopping the host.

    Ordinary memory is registered with the device: pinned memory of torch's allocator is rounded up to a power of two.

    Raises:
        RuntimeError: the memory cannot be locked in place; the message says how much it was.
    """
    memory = torch.zeros(numel, dtype=dtype)
    on_device = device.type == "cuda" and numel > 0 and not is_simulated()
    if on_device and (failure := lock_in_place(memory, device)):
        raise RuntimeError(
            f"{memory.nbytes / 2**30:.2f} GiB of host memory could not be locked in place (CUDA error {failure}), which "
            "plan.offload needs; look at `ulimit -l` and the memory limit of the container, or offload less"
        )
    return memory


def lock_in_pieces(memory: Tensor, device: torch.device, pause: Pause) -> int:
    """As `lock_in_place`, piece by piece of `PIECE` bytes: a copy may not reach from one into the next.

    Args:
        memory: of bytes, which begins with a page.
        pause: called after each piece with the seconds that it took, in which the device was given nothing to do.
    """
    for piece in memory.split(PIECE):
        began = time.monotonic()
        if failure := lock_in_place(piece, device, of=memory):
            return failure
        pause(time.monotonic() - began)
    return 0


def lock_in_place(memory: Tensor, device: torch.device, of: Tensor | None = None) -> int:
    """Register host memory with a device for as long as the tensor lives; 0, or CUDA's error if it cannot be locked.

    Args:
        of: the tensor that lives; left out, `memory`.
    """
    size, address = memory.numel() * memory.element_size(), memory.data_ptr()
    with torch.cuda.device(device):
        failure = int(_runtime().cudaHostRegister(address, size, 0))
    if failure:
        with suppress(RuntimeError):  # takes the error up, which else the next kernel of anyone would raise
            torch.zeros((), device=device).add_(1)
    else:
        # at the end the process gives all back
        weakref.finalize(memory if of is None else of, _unregister, address).atexit = False
    return failure


def _unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()
