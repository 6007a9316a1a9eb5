"""Which ranks reach each other's memory, as `peers` needs it."""

from __future__ import annotations

import math
import os
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.observe.calls import Group
from shoal.parallel.peers import Peers, Region
from shoal.simulated import is_simulated
from shoal.world import World

LEAST_RATE = 100e9
"""bytes a second at which ranks must read each other's memory: NVLink does; over PCIe NCCL has better ways"""
MEASURED = 64 << 20  # bytes


def find_peers(group: dist.ProcessGroup, world: World, wanted: bool | None) -> Peers | None:
    """The ranks of a group, where they reach each other's memory fast. Collective over the group.

    Args:
        wanted: None: where it can be; False: not at all; True: or else an error.

    Raises:
        ValueError: it is wanted, and cannot be; the message says why, on all ranks of the group.
    """
    if wanted is False or is_simulated() or group.size() == 1:
        return None
    if why := _why_not(group, world):
        if wanted:
            raise ValueError(f"plan.copy_engines: {why}; leave it out")
        return None
    kind = group.group_desc.removeprefix("mesh_")
    here = Group(group.group_name, kind, tuple(dist.get_process_group_ranks(group)))

    def note(text: str) -> None:
        if world.calls is not None:
            world.calls.add(here, text, f"{__file__}:{note.__code__.co_firstlineno} in note")

    return Peers(group.size(), lambda nbytes: _region(group, world.device, nbytes), note)


def _why_not(group: dist.ProcessGroup, world: World) -> str:
    """Why ranks of a group cannot send by copy engines; empty if they can. All of them find the same."""
    if world.device.type != "cuda" or torch.version.hip is not None:
        return "it is for NVIDIA GPUs"
    if world.compares_calls:
        return "ranks compare with each other what they call, and copies are not called"
    if not world.is_one_host(group):
        return "it is for GPUs of one host, and ranks that cut the model are on several"
    region = None
    with suppress(RuntimeError):
        region = _region(group, world.device, MEASURED)
    if not _all_have(region is not None, group, world):
        return "the driver does not let processes share memory of their GPUs"
    rate = _rate(region) if region is not None else 0.0
    if not _all_have(rate >= LEAST_RATE, group, world):
        return "GPUs of this host read each other's memory at less than 100 GB/s, where NCCL has better ways"
    return ""


def _region(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> Region:
    """By a module that torch documents under its private name alone (pytorch, docs/source/symmetric_memory.md). Collective."""
    from torch.distributed import _symmetric_memory as symmetric

    # each region would be given an address that writes to all GPUs at once, of which switches have few, and nobody here uses it
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if torch.cuda.mem_get_info(device)[0] < nbytes:  # torch's allocator may keep as much that nobody uses
        torch.cuda.empty_cache()
    own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, group)

    def tensor(rank: int, begin: int, numel: int, kind: torch.dtype) -> Tensor:
        return handle.get_buffer(rank, (numel,), kind, begin // kind.itemsize)

    return Region(group.rank(), group.size(), tensor, handle.barrier, own)


def _rate(region: Region) -> float:
    """Bytes a second from the next rank's memory, while all ranks read; the best of some."""
    source = region.tensor(region.others[0], 0, MEASURED, torch.uint8)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        region.meet()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return MEASURED / best


def _all_have(own: bool, group: dist.ProcessGroup, world: World) -> bool:
    agreed = torch.tensor(float(own), device=world.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())
