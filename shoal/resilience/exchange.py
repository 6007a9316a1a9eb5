"""What ranks send each other of their state beside training: to the next machine as they go, and to those that have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.world import World


class Neighbours(NamedTuple):
    """To whom this rank copies its state, and whose it has as a guest."""

    to: int
    of: int
    kind: str
    """of the guest's state"""
    nbytes: int
    world: World

    @classmethod
    def find(cls, kind: str, nbytes: int, machine: int, world: World) -> Neighbours:
        """Ranks of the next machine, in their order there. Collective.

        Args:
            kind, nbytes: of this rank's state. machine: a number that ranks of a machine share.

        Raises:
            ValueError: on all ranks: machines have different numbers of ranks.
        """
        told = [json.loads(text) for text in tell_all(json.dumps([machine, kind, nbytes]), world)]
        machines: dict[int, list[int]] = {}
        for rank, (where, _, _) in enumerate(told):
            machines.setdefault(where, []).append(rank)
        rings = list(machines.values())
        if len({len(ranks) for ranks in rings}) > 1:
            raise ValueError("machines have different numbers of ranks")
        here = list(machines).index(machine)
        at = rings[here].index(world.rank)
        of = rings[here - 1][at]
        return cls(rings[(here + 1) % len(rings)][at], of, told[of][1], told[of][2], world)

    def exchange(self, mine: Tensor, theirs: Tensor) -> None:
        """Send this rank's state, and fill `theirs` with the guest's. Collective."""
        wait_until_sent = isend(mine, self.to, self.world)
        theirs.copy_(receive(self.nbytes, self.of, self.world))
        wait_until_sent()


def tell_all(text: str, world: World) -> list[str]:
    """What each rank says, on all ranks. Collective."""
    import torch
    import torch.distributed as dist

    if world.size == 1:
        return [text]
    raw = torch.tensor(list(text.encode()), dtype=torch.uint8, device=world.device)
    sizes = [torch.empty(1, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([len(raw)], device=world.device))
    longest = int(torch.cat(sizes).max())
    everyone = [torch.empty(longest, dtype=torch.uint8, device=world.device) for _ in range(world.size)]
    dist.all_gather(everyone, torch.nn.functional.pad(raw, (0, longest - len(raw))))
    return [bytes(said[: int(size)].tolist()).decode() for said, size in zip(everyone, sizes, strict=True)]


def send(slot: Tensor, to: int, world: World) -> None:
    isend(slot, to, world)()


def isend(slot: Tensor, to: int, world: World) -> Callable[[], object]:
    """Begin to send; what is returned waits for the end."""
    import torch.distributed as dist

    wire = slot if "gloo" in world.backend else slot.to(world.device)
    work = dist.isend(wire, to) if len(wire) else None
    return work.wait if work is not None else lambda: wire


def receive(nbytes: int, source: int, world: World) -> Tensor:
    import torch
    import torch.distributed as dist

    wire = torch.empty(nbytes, dtype=torch.uint8, device="cpu" if "gloo" in world.backend else world.device)
    if nbytes:
        dist.recv(wire, source)
    return wire.cpu()
