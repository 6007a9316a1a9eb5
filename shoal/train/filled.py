"""What fills the memory of a rank that has none left: a few lines that go with the error into the report."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.observe import host
from shoal.observe.metrics import GIB
from shoal.resilience.handover import HandOver
from shoal.resilience.memory import is_out_of_memory
from shoal.train.step import Step

LARGEST = 4  # sizes of blocks that are told


@contextmanager
def memory_told(step: Step, device: torch.device, saves: HandOver | None = None) -> Generator[None]:
    """Around training: an error for want of memory goes on with what filled it.

    What it held is held still, by the frames of the error.

    Args:
        saves: what may have copies on the device.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            with suppress(Exception):  # nothing may hide the error itself
                held = step.optimizer.held()
                if saves is not None and saves.copies:
                    held["copies of what is saved"] = saves.copies
                for line in what_fills(held, device, step.shared_bytes):
                    error.add_note(line)
        raise


def what_fills(held: Mapping[str, Iterable[Tensor]], device: torch.device, shared: int = 0) -> list[str]:
    """Lines on a rank's memory.

    Args:
        held: this rank's parts of what training keeps, by kind.
        shared: bytes of a GPU beside the allocator's, which other ranks read.
    """
    tensors = {kind: list(parts) for kind, parts in held.items()}
    if device.type == "cuda":
        return _on_gpu(tensors, torch.cuda.memory_snapshot(), device, shared)
    kinds = ", ".join(f"{kind} {_size(sum(map(_nbytes, parts)))}" for kind, parts in tensors.items())
    found = [f"of it {kinds}; the rest is activations and the program"]
    if (resident := _resident_bytes()) is not None:
        memory = host.memory()
        used = f"; in use on the host are {memory.describe()}" if memory else ""
        found.insert(0, f"this process holds {_size(resident)}{used}")
    return found


def _on_gpu(
    tensors: Mapping[str, list[Tensor]],
    segments: Iterable[Mapping[str, Any]],
    device: torch.device,
    shared: int,
) -> list[str]:
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - used
    others = total - free - used - cached - shared
    read = f"{_size(shared)} are gathered parameters and what is sent, " if shared else ""
    lines = [
        f"of {_size(total)} on {device}, tensors hold {_size(used)}, the allocator keeps {_size(cached)} more in pieces, "
        f"{read}and {_size(others)} are CUDA's, NCCL's and other processes'"
    ]
    kinds, rest = blocks_by_kind(tensors, segments, device.index or 0)
    told = ", ".join(f"{kind} {_size(size)}" for kind, size in kinds.items())
    lines.append(f"tensors are {told}, and activations and buffers {_size(sum(rest.values()))}")
    if rest:
        lines.append(f"largest of these: {_largest(rest, _shapes(device))}")
    return lines


def blocks_by_kind(
    tensors: Mapping[str, list[Tensor]], segments: Iterable[Mapping[str, Any]], device: int
) -> tuple[dict[str, int], dict[int, int]]:
    """Bytes of allocated blocks by kind, and of those that are of no kind the sizes by address."""
    rest: dict[int, int] = {}
    for segment in segments:
        if segment.get("device", device) == device:
            rest |= {b["address"]: b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    found: dict[str, int] = {}
    for kind, parts in tensors.items():
        addresses = {part.untyped_storage().data_ptr() for part in parts}
        found[kind] = sum(rest.pop(address, 0) for address in addresses)
    return found, rest


def _largest(rest: Mapping[int, int], shapes: Mapping[int, str]) -> str:
    """Blocks that take most in all, those of one size together, with a shape where Python has such a tensor."""
    counts = Counter(rest.values())
    most = sorted(counts, key=lambda size: -size * counts[size])[:LARGEST]
    said = []
    for size in most:
        shape = next(
            (shapes[address] for address, own in rest.items() if own == size and address in shapes), ""
        )
        said.append(f"{counts[size]} x {_size(size)}" + (f" (such as {shape})" if shape else ""))
    return ", ".join(said)


def _shapes(device: torch.device) -> dict[int, str]:
    """Type and shape of the tensors that Python knows, by the address of their memory."""
    found = {}
    for thing in gc.get_objects():
        with suppress(Exception):  # an object may be half made
            if isinstance(thing, Tensor) and thing.device == device:
                name = str(thing.dtype).removeprefix("torch.")
                found[thing.untyped_storage().data_ptr()] = f"{name} {list(thing.shape)}"
    return found


def _nbytes(part: Tensor) -> int:
    return part.untyped_storage().nbytes()


def _resident_bytes() -> int | None:
    """Memory of this process now; None where the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
