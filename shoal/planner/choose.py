"""The plan that is taken when none is said: the simplest that surely fits.

Copies of the model are fastest and simplest while they fit with room for activations; then optimizer state and gradients are
cut (ZeRO-2), then parameters too (ZeRO-3). Between nodes, whose links are slow, copies are kept.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.job import Train
from shoal.plan import Plan

MASTER_BYTES = 16  # a parameter, its gradient and AdamW's two moments, in fp32
COPY_BYTES = 2  # a parameter in the compute type, while it is gathered
STATE_SHARE = 0.45  # of a device's memory; the rest is for activations and the allocator


class Workload(NamedTuple):
    """What decides memory."""

    parameters: int
    activation_bytes_per_sample: int
    """what one sample leaves for backward; 0 where it is not known"""


def choose_plan(train: Train, work: Workload, cluster: Cluster) -> Plan:
    """A plan for all devices of a cluster.

    Raises:
        ValueError: the global batch cannot be dealt out to the devices; the message says which could.
    """
    devices = cluster.num_devices
    if train.global_batch % devices:
        below = train.global_batch // devices * devices
        near = " or ".join(str(batch) for batch in (below, below + devices) if batch)
        raise ValueError(
            f"train.global_batch = {train.global_batch} cannot be dealt out evenly to {devices} devices; use {near}, or "
            "another number of devices (cluster = ...)"
        )
    plan = _data_parallel(work, cluster)
    return plan.model_copy(update={"micro_batch": _micro_batch(train, work, cluster)})


def _data_parallel(work: Workload, cluster: Cluster) -> Plan:
    devices, memory = cluster.num_devices, cluster.device.memory_bytes
    budget = STATE_SHARE * memory if memory else None
    if budget is None or work.parameters * (MASTER_BYTES + COPY_BYTES) <= budget:
        return Plan(replicate=devices)
    per_node = cluster.devices_per_node
    within = work.parameters * (COPY_BYTES + MASTER_BYTES / per_node)
    if within <= budget:
        return Plan(replicate=cluster.nodes, shard=per_node, zero=2)
    if work.parameters * MASTER_BYTES / per_node <= budget:
        return Plan(replicate=cluster.nodes, shard=per_node, zero=3)
    return Plan(shard=devices, zero=3)


def _micro_batch(train: Train, work: Workload, cluster: Cluster) -> int:
    """The largest part of a rank's samples whose activations take at most a third of memory."""
    local = train.global_batch // cluster.num_devices
    memory = cluster.device.memory_bytes
    if not memory or not work.activation_bytes_per_sample:
        return local
    most = max(1, int(memory / 3 // work.activation_bytes_per_sample))
    return max(size for size in range(1, local + 1) if local % size == 0 and size <= most)
