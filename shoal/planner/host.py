"""Host memory that the ranks of a node need together: for tensors that a plan keeps there, and for copies of the state.

On a CPU that is all memory; ranks of GPUs have what `plan.offload` moved. Saves that nobody waits for are left out: they look for
room themselves, and are done in line where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.cluster import GIB, Cluster
from shoal.plan import Plan
from shoal.planner.memory import Category, Fit, Memory, most_of
from shoal.planner.trace import Trace
from shoal.resilience.snapshot import lost_with_one

SLOTS = 2  # states that a rank has room for: see `shoal.resilience.snapshot`
STATE = (Category.PARAMETERS, Category.OPTIMIZER)
TIGHT = 0.1  # of the host's: programs themselves, data and the system are not counted
LEAST_BYTES = 64 << 20  # of tensors of GPUs' ranks in host memory that are told: batches are less


class Host(NamedTuple):
    """What the node that needs most needs, in bytes."""

    tensors_bytes: int
    copies_bytes: int
    """of the state, to go on from when ranks are started again"""
    total_bytes: int | None
    """that a node has; None where that is not known"""

    @property
    def needed_bytes(self) -> int:
        return self.tensors_bytes + self.copies_bytes

    @property
    def fit(self) -> Fit:
        """Whether it is there; where it is not known how much is, it is taken to be."""
        if self.total_bytes is None:
            return Fit.FITS
        if self.needed_bytes > self.total_bytes:
            return Fit.NOT
        return Fit.TIGHT if self.needed_bytes > (1 - TIGHT) * self.total_bytes else Fit.FITS

    @property
    def advice(self) -> list[str]:
        """What to change if it is not there, or hardly."""
        if self.fit is Fit.FITS:
            return []
        copies = ["checkpoint.memory_every = 0, with checkpoint.every"] if self.copies_bytes else []
        return [*copies, "more nodes, or ones with more host memory"]

    def describe(self) -> str:
        """In words; empty where nothing is needed that is worth a word.

        Example:
            >>> Host(3 * GIB, 0, 16 * GIB).describe()
            '3.0 of 16.0 GiB of host memory a node'
        """
        if self.needed_bytes < LEAST_BYTES and self.fit is Fit.FITS:
            return ""
        of = "" if self.total_bytes is None else f" of {self.total_bytes / GIB:.1f}"
        copies = (
            f", {self.copies_bytes / GIB:.1f} of it for checkpoint.memory_every" if self.copies_bytes else ""
        )
        return f"{self.needed_bytes / GIB:.1f}{of} GiB of host memory a node{copies}"


def host_of(
    traces: Mapping[int, Trace], memories: Mapping[int, Memory], plan: Plan, cluster: Cluster, *, copies: bool
) -> Host:
    """What ranks of a plan need, of the node where that is most.

    Args:
        traces, memories: of one rank for each rank of the pipeline.
        copies: whether ranks keep their state in memory for restarts.
    """
    each = plan.world_size // plan.pipeline  # the pipeline is the slowest axis
    node = cluster.devices_per_node
    slots = SLOTS if copies else 0
    if lost_with_one(plan, range(0, plan.world_size, node)):
        slots *= 2  # and those of another node's rank
    tensors, states = [], []
    for rank, trace in traces.items():
        memory = memories[rank]
        tensors.append(memory.host_bytes if cluster.device.type == "cuda" else memory.peak.allocated_bytes)
        states.append(slots * _state_bytes(trace) if slots else 0)
    ranks = [
        [rank // each for rank in range(first, min(first + node, plan.world_size))]
        for first in range(0, plan.world_size, node)
    ]
    most = max(ranks, key=lambda those: sum(tensors[place] + states[place] for place in those))
    total = None if cluster.host_gib is None else int(cluster.host_gib * GIB)
    return Host(sum(tensors[place] for place in most), sum(states[place] for place in most), total)


def _state_bytes(trace: Trace) -> int:
    """Of parameters and the optimizer, wherever they are."""
    return sum(most_of(trace, device, category) for device in ("cuda", "cpu") for category in STATE)
