"""Host memory that a device reads and writes by itself, and copies that run beside its computation.

[Note: memory of copies] The host goes on while a copy runs, so nothing that a copy reads or writes may be given back before it is
done. That is not left to the allocator of device memory: whoever lets go of some makes the stream that it belongs to wait for the
copy first. Pinned memory of torch's own allocator is reused only after the copies that were made of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from shoal.simulated import is_simulated


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
        with torch.cuda.stream(self._stream):
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


def lock_in_place(memory: Tensor, device: torch.device) -> int:
    """Register host memory with a device for as long as the tensor lives; 0, or CUDA's error if it cannot be locked."""
    size, address = memory.numel() * memory.element_size(), memory.data_ptr()
    with torch.cuda.device(device):
        failure = int(_runtime().cudaHostRegister(address, size, 0))
    if failure:
        with suppress(RuntimeError):  # takes the error up, which else the next kernel of anyone would raise
            torch.zeros((), device=device).add_(1)
    else:
        # at the end the process gives all back
        weakref.finalize(memory, _unregister, address).atexit = False
    return failure


def _unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()
