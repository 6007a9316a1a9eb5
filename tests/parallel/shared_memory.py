"""Memory that Gloo ranks share, in place of what GPUs of a host share."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.peers import Peers, Region


def shared_region(folder: Path, name: str, group: dist.ProcessGroup, room: int) -> Region:
    """A file for each rank in `folder`, mapped by all. Collective."""
    ranks = dist.get_process_group_ranks(group)
    own = folder / f"{name}-{ranks[group.rank()]}"
    own.write_bytes(bytes([0xA5]) * room)  # what was there before must not matter
    dist.barrier(group)
    return Region(
        group.rank(), [_mapped(folder / f"{name}-{rank}") for rank in ranks], lambda: dist.barrier(group)
    )


def shared_peers(folder: Path, group: dist.ProcessGroup, room: int, notes: list[str]) -> tuple[Peers, Peers]:
    """For gathers and for exchanges."""
    name = group.group_name
    both = [shared_region(folder, f"{name}-{use}", group, room) for use in ("gather", "exchange")]
    return Peers(both[0], notes.append), Peers(both[1], notes.append)


def _mapped(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
