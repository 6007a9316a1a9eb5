"""The plan that is taken when none is said: the fastest that surely fits, by measured rules.

Models are cut over the GPUs of a node, so that each updates only its part: at 1.24B parameters on 4 H100s ZeRO-2 ran 58,600
tokens/s/GPU where copies ran 51,200 (benchmarks/results/step_1b_4xh100.md). Parameters are cut too (ZeRO-3) when they do not fit
otherwise. Between nodes, whose links are slow, copies are kept.

A step of a small model waits for the host, which launches thousands of kernels. Where the model is known to do the same in every
step, it is recorded: at 433M parameters on 2 H200s that runs 135,300 tokens/s/GPU (benchmarks/results/best_peers_2xh200.json).
Small models that are not known so, or on several nodes, are copied, and the known ones compiled as one graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.cluster import GIB, Cluster
from shoal.job import NARROW, Train
from shoal.plan import AXES, MOST_RECORDED, Plan

SMALL = 500e6  # parameters; below, many small collectives that the host launches cost more than the update of the whole
RECORDED = 2e9  # parameters; above, the host is ahead of any GPU (1.24B gains in float8 or on slow hosts, else nothing)
STATE_SHARE = 0.45  # of a device's memory; the rest is for activations and the allocator
KEPT_SHARE = 0.76  # of what one sample is estimated to leave for backward: so much `shoal plan` has of 8B, 8,192 tokens, compiled
ROOMY_SHARE = 0.9  # of memory, for what is held and kept; the rest is for the allocator
OUTSIDE_BYTES = int(4.3 * GIB)  # context and communicators


class Workload(NamedTuple):
    """What decides memory."""

    parameters: int
    activation_bytes_per_sample: int
    """what one sample leaves for backward; 0 where it is not known"""
    steady: bool = False
    """the model is known to do the same in every step: it compiles as one graph, and can be recorded"""


def choose_plan(
    train: Train,
    work: Workload,
    cluster: Cluster,
    *,
    said: Plan | None = None,
) -> Plan:
    """A plan for all devices of a cluster, with nothing said but a ZeRO stage and a micro-batch."""
    plan = choose_degrees(train, work, cluster, said=said)
    return with_graphs(plan, work, cluster, train.global_batch)


def choose_degrees(train: Train, work: Workload, cluster: Cluster, *, said: Plan | None = None) -> Plan:
    """Degrees, ZeRO stage and micro-batch for all devices of a cluster.

    Args:
        said: what is said of other parts of a plan, and of it heeded: `zero` 0 keeps whole copies, 1 to 3 cut over the devices of
            a node, or over nodes that have one device each.

    Raises:
        ValueError: the global batch cannot be dealt out to the devices; the message says which could.
    """
    require_even(train, cluster)
    said = said or Plan()
    chosen = said.micro_batch or _micro_batch(train, work, cluster)
    if said.zero is not None:
        plan = _with_zero(said.zero, cluster)
    else:
        count = train.global_batch // cluster.num_devices // chosen
        cut = Plan(shard=cluster.num_devices)
        recorded = _recorded(cut.model_copy(update=_parts(said)), work, cluster, count) is not None
        plan = _data_parallel(train, work, cluster, said, copied=not (recorded or said.cuda_graphs))
    return plan.model_copy(update={"micro_batch": chosen})


def _parts(said: Plan) -> dict[str, Any]:
    """What is said that is no degree."""
    return said.model_dump(include=said.model_fields_set - {*AXES, "expert", "zero"})


def with_graphs(plan: Plan, work: Workload, cluster: Cluster, global_batch: int) -> Plan:
    """The plan with fewer launches, where nothing is said of them, the plan allows it, and steps would wait for the host.

    They are recorded, or, as copies on several devices, compiled as one graph.
    """
    if global_batch < plan.all_shares:
        return plan  # for which it is refused
    count = plan.micro_batches(global_batch)[0]
    if (recorded := _recorded(plan, work, cluster, count)) is not None:
        return recorded
    waits = cluster.device.type == "cuda" and work.steady and work.parameters < SMALL
    if plan.compile is None and plan.only_copies and not plan.cuda_graphs and waits:
        return _with(plan, compile="model") or plan
    return plan


def _recorded(plan: Plan, work: Workload, cluster: Cluster, micro_batches: int) -> Plan | None:
    """The plan recorded; None where something is said of that, it would not be faster, or cannot be."""
    if plan.cuda_graphs is not None or plan.cut != plan.world_size or micro_batches > MOST_RECORDED:
        return None
    return _with(plan, cuda_graphs=True) if _is_recorded(work, cluster) else None


def _with(plan: Plan, **keys: Any) -> Plan | None:
    """None if they do not go with the plan."""
    try:
        return Plan.model_validate(plan.model_dump(include=plan.model_fields_set) | keys)
    except ValueError:
        return None


def _is_recorded(work: Workload, cluster: Cluster) -> bool:
    return (
        cluster.device.type == "cuda"
        and cluster.nodes == 1
        and not cluster.device.kind.startswith("mi")  # AMD's: not tried
        and work.steady
        and 0 < work.parameters < RECORDED
    )


def require_even(train: Train, cluster: Cluster) -> None:
    """Raises ValueError if the global batch cannot be dealt out evenly to the cluster's devices."""
    devices = cluster.num_devices
    if train.global_batch % devices:
        below = train.global_batch // devices * devices
        near = " or ".join(str(batch) for batch in (below, below + devices) if batch)
        raise ValueError(
            f"train.global_batch = {train.global_batch} cannot be dealt out evenly to {devices} devices; use {near}, or "
            "another number of devices (cluster = ...)"
        )


def _with_zero(zero: int, cluster: Cluster) -> Plan:
    if zero == 0 or cluster.num_devices == 1:
        return Plan(replicate=cluster.num_devices)
    if cluster.devices_per_node == 1:
        return Plan.model_validate({"shard": cluster.nodes, "zero": zero})
    return Plan.model_validate({"replicate": cluster.nodes, "shard": cluster.devices_per_node, "zero": zero})


def _data_parallel(train: Train, work: Workload, cluster: Cluster, said: Plan, *, copied: bool) -> Plan:
    """`copied`: copies of a small model are preferred."""
    share, micro_batch = KEPT_SHARE if said.compile is not False else 1.0, said.micro_batch
    memory = cluster.device.memory_bytes
    if memory is None:
        return Plan(replicate=cluster.num_devices)
    master = 8 if train.precision == "fp64" else 4
    state = 4 * master * work.parameters  # a parameter, its gradient and AdamW's two moments
    gathered = (2 if train.precision in NARROW else master) * work.parameters  # in the compute type
    budget, per_node = STATE_SHARE * memory, cluster.devices_per_node
    copied = copied and work.parameters < SMALL
    if state + gathered <= budget and (copied or cluster.num_devices == 1):
        return Plan(replicate=cluster.num_devices)
    held = gathered + state / per_node
    activations = work.activation_bytes_per_sample * (micro_batch or 1)
    kept = share * activations + OUTSIDE_BYTES
    # of a micro-batch that is said, or where there is room for no more than one sample, all that there will be is known
    known = activations > 0 and (micro_batch is not None or activations > memory / 3)
    fits = held + kept <= ROOMY_SHARE * memory if known else held <= budget and held + kept <= memory
    if per_node > 1 and fits:
        return Plan(replicate=cluster.nodes, shard=per_node, zero=2)
    if per_node > 1 and state / per_node <= budget:
        return Plan(replicate=cluster.nodes, shard=per_node, zero=3)
    return Plan(shard=cluster.num_devices, zero=3)


def _micro_batch(train: Train, work: Workload, cluster: Cluster) -> int:
    """The largest part of a rank's samples whose activations take at most a third of memory."""
    local = train.global_batch // cluster.num_devices
    memory = cluster.device.memory_bytes
    if not memory or not work.activation_bytes_per_sample:
        return local
    most = max(1, int(memory / 3 // work.activation_bytes_per_sample))
    return max(size for size in range(1, local + 1) if local % size == 0 and size <= most)
