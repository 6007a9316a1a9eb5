"""Whether copies of the state are still equal: memory or arithmetic that went wrong in silence on a rank makes its copy another.

Ranks of the replicate axis hold the same tensors and make the same updates, bit for bit. Before state is kept, in memory or on
disk, they compare a hash of each tensor; what differs is told with the rank, if there is a majority, and is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.plan import Plan
    from shoal.world import World


class DivergedError(RuntimeError):
    """Copies of a tensor differ between ranks that made the same updates."""


def require_copies(every: int, plan: Plan) -> None:
    """Raises ValueError if copies are to be compared and there is one."""
    if every and plan.replicate == 1:
        raise ValueError(
            f"run.compare_every = {every}, but the plan ({plan.describe()}) has one copy of the state and nothing to compare "
            "it with; leave it out, or choose plan.replicate above 1"
        )


def require_equal_replicas(state: Mapping[str, Tensor], plan: Plan, world: World, done: int) -> None:
    """Compare this rank's tensors with those of the other replicas. Collective.

    Raises:
        DivergedError: on the rank whose copy differs from most others', or on all if there is no majority. Others return and
            wait for it at their next collective.
    """
    if plan.replicate == 1:
        return
    import torch
    import torch.distributed as dist

    from shoal.train.optimizer import local

    names = sorted(state)
    group = world.mesh(plan).get_group("replicate")
    mine = torch.stack([_hash(local(state[name])).to(world.device) for name in names])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    hashes = torch.stack(everyone).tolist()  # (replicas, tensors)
    ranks = dist.get_process_group_ranks(group)
    for at, name in enumerate(names):
        values = {rank: row[at] for rank, row in zip(ranks, hashes, strict=True)}
        if len(set(values.values())) > 1:
            _judge(name, values, world.rank, done)
            return


def _judge(name: str, values: dict[int, int], rank: int, done: int) -> None:
    """Raise on the ranks whose copy is not that of most, or on all if there is no majority."""
    usual, count = Counter(values.values()).most_common(1)[0]
    kept = f"after step {done} {{}}, which made the same updates{{}}. State of this step is not kept; if it happens again, {{}}"
    if 2 * count <= len(values):
        said = f"the copies of {name} on ranks {list(values)}"
        wrong = ", differ: the memory or arithmetic of one of them went wrong"
        raise DivergedError(kept.format(said, wrong, "test these devices"))
    if values[rank] != usual:
        most = [other for other, value in values.items() if value == usual]
        said = f"this rank's copy of {name} is not that of ranks {most}"
        raise DivergedError(
            kept.format(said, ": its memory or arithmetic went wrong", "leave this device out")
        )


def _hash(tensor: Tensor) -> Tensor:
    """64 bits of a tensor, as a signed number: another one if any single bit is another."""
    import torch

    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(bits) // 8 * 8
    rest = bits[whole:].to(torch.int64)
    places = torch.arange(len(rest), device=bits.device, dtype=torch.int64)
    tail = (rest << (8 * places)).sum()
    if not whole:
        return tail
    words = bits[:whole].view(torch.int64)
    return torch.hash_tensor(words).view(torch.int64) ^ tail
