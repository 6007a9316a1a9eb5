"""What collectives take on the ranks of one node, and by how much they and computing slow each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from shoal.bench.device_sizes import Sizes
from shoal.bench.stopwatch import Call, Stopwatch, clamped
from shoal.parallel.peers import Peers
from shoal.plan import Plan
from shoal.world import World

# torch 2.13 renames them
_gather_in_order = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_in_order = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WINDOW_S = 10e-3  # for which something is watched beside something else
LONGER = 2.5  # what runs beside it lasts so many times as long, so that it is not over first
SAMPLES = 5


def group_sizes(ranks: int) -> list[int]:
    """2, 4, 8 ... as far as they divide the ranks, and all ranks.

    Example:
        >>> group_sizes(12), group_sizes(3), group_sizes(1)
        ([2, 4, 12], [3], [])
    """
    powers = [2**power for power in range(1, ranks.bit_length()) if ranks % 2**power == 0]
    return sorted({*powers, ranks} - {1})


def group_of(world: World, size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours; all such groups then work at once, as those of a mesh axis do."""
    return world.mesh(Plan(replicate=world.size // size, shard=size)).get_group("shard")


def collective_s(
    stopwatch: Stopwatch, kind: str, group: dist.ProcessGroup, dtype: str, size_bytes: int, left_s: float
) -> float:
    """Seconds of a collective on this rank; `size_bytes` of the whole tensor, of all_to_all and send of what a rank sends."""
    return stopwatch.median(prepared(stopwatch, kind, group, dtype, size_bytes), left_s)


def prepared(stopwatch: Stopwatch, kind: str, group: dist.ProcessGroup, dtype: str, size_bytes: int) -> Call:
    """A collective with its tensors: zeros, whose sum stays what it is."""
    number: torch.dtype = getattr(torch, dtype)
    part = torch.zeros(size_bytes // number.itemsize // group.size(), dtype=number, device=stopwatch.device)
    return KINDS[kind](part.repeat(group.size()), part, group)


def peers_s(
    stopwatch: Stopwatch, peers: Peers, group: dist.ProcessGroup, dtype: str, size_bytes: int, left_s: float
) -> float:
    """As `collective_s`, of a gather by copy engines through a room, as ZeRO-3 gathers parameters and gradients are sent."""
    number: torch.dtype = getattr(torch, dtype)
    whole = torch.zeros(size_bytes // number.itemsize, dtype=number, device=stopwatch.device)
    part = whole.view(group.size(), -1)[group.rank()]
    return stopwatch.median(lambda: peers.gather([whole], [part]), left_s)


def shared_s(
    stopwatch: Stopwatch, peers: Peers, group: dist.ProcessGroup, dtype: str, size_bytes: int, left_s: float
) -> float:
    """As `peers_s`, of tensors that stay in memory which others read, as ZeRO-1 and 2 keep gathered parameters."""
    number: torch.dtype = getattr(torch, dtype)
    shared = peers.share([size_bytes // number.itemsize // group.size()], [number])
    return stopwatch.median(shared.gather, left_s)


BY_COPIES = {"peers": peers_s, "shared": shared_s}
"""what goes by copy engines, in which ways"""


def whole_bytes(size_bytes: int, ranks: int, dtype: str) -> int:
    """Of the tensor of about `size_bytes` that can be cut into equal parts."""
    number: torch.dtype = getattr(torch, dtype)
    return size_bytes // number.itemsize // ranks * ranks * number.itemsize


Maker = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], Call]


def _all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Call:
    return lambda: _gather_in_order(whole, part, group=group)


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Call:
    return lambda: _scatter_in_order(part, whole, group=group)


def _all_reduce(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Call:
    return lambda: dist.all_reduce(whole, group=group)


def _all_to_all(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Call:
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


def _broadcast(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Call:
    return lambda: dist.broadcast(whole, group_src=0, group=group)


def _send(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """To the next rank of a ring, while the last one's comes, as stages of a pipeline do."""
    received, here, size = torch.empty_like(whole), group.rank(), group.size()

    def call() -> None:
        there = dist.P2POp(dist.isend, whole, group=group, group_peer=(here + 1) % size)
        back = dist.P2POp(dist.irecv, received, group=group, group_peer=(here - 1) % size)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()

    return call


KINDS: dict[str, Maker] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}


def slow_downs(
    stopwatch: Stopwatch, group: dist.ProcessGroup, sizes: Sizes, left_s: float
) -> dict[str, float]:
    """By how much a large product slows beside an all_gather, and the all_gather beside products."""
    number: torch.dtype = getattr(torch, sizes.dtype)
    matrix = torch.randn(sizes.large, sizes.large, dtype=number, device=stopwatch.device)
    gather = prepared(stopwatch, "all_gather", group, sizes.dtype, sizes.gathered)

    def multiply() -> torch.Tensor:
        return torch.mm(matrix, matrix)

    multiply_s, gather_s = (
        stopwatch.agree(stopwatch.median(call, left_s / 4)) for call in (multiply, gather)
    )
    return {
        "computing": _slow_down(stopwatch, multiply, multiply_s, gather, gather_s),
        "collectives": _slow_down(stopwatch, gather, gather_s, multiply, multiply_s),
    }


def _slow_down(stopwatch: Stopwatch, call: Call, call_s: float, other: Call, other_s: float) -> float:
    """How many times as long `call` takes while `other` runs; seconds are of each alone, equal on all ranks."""
    times = clamped(WINDOW_S / call_s, 1, 20)
    enough = math.ceil(LONGER * (times + 1) * call_s / other_s)

    def others() -> None:
        for _ in range(enough):
            other()

    samples = []
    for _ in range(SAMPLES):
        stopwatch.agree(0.0)  # ranks begin together, else one's collective waits for another's
        samples.append(stopwatch.sample(call, times, beside=others))
    return max(1.0, statistics.median(samples) / call_s)
