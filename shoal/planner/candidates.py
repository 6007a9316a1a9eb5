"""Plans that a job can have on a cluster, and a first guess of their memory and time, by which a search knows where to begin.

The guesses are scaled from one simulated step on one device. They decide the order in which plans are simulated, and which are
not; what is told of a plan that was simulated is its simulation's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.job import NARROW
from shoal.plan import Plan, effective
from shoal.planner.choose import Workload, with_graphs
from shoal.planner.cost import Costs
from shoal.planner.memory import CONTEXT_BYTES

LONG = 16_384  # tokens; below, the samples of a batch are dealt out before sequences are cut
MOST_PIPELINE, MOST_CONTEXT, MOST_MICRO_BATCH = 32, 16, 16
AGAIN = {"none": 1.0, "selective": 1.08, "full": 1.28}
"""forward and backward with what is computed again, by the shares of an 8B step"""
KEPT_SHARE = {"none": 1.0, "selective": 0.6, "full": 0.08}
"""of activations that are kept, roughly"""
SMALLER = 0.06  # by how much products are less efficient for each halving by tensor
BUCKETS_BYTES = 768 << 20  # on the device, while an optimizer's state is brought and sent
HIDDEN = 0.85  # of the time of computing that collectives of sharding can hide behind


class Base(NamedTuple):
    """One sample on one device, simulated: what guesses are scaled from."""

    parameters: int
    block_parameters: int
    """of the largest block"""
    blocks: int
    compute_s: float
    """forward and backward"""
    activation_bytes: int
    boundary_bytes: int
    """of what one block gives to the next"""


@dataclass(frozen=True)
class Guess:
    """A plan, and what it may take."""

    plan: Plan
    state_bytes: float
    """of parameters, gradients and optimizer, at least"""
    memory_bytes: float
    host_bytes: float
    """of parameters, gradients and optimizer that are moved there, at least"""
    step_s: float

    @property
    def kind(self) -> str:
        """Plans of a kind spread a model along the same axes: the best of each is worth a look."""
        plan = self.plan
        axes = [axis for axis in ("pipeline", "context", "tensor", "expert") if getattr(plan, axis) > 1]
        if plan.shard > 1:
            axes.append(f"zero {plan.zero_stage}" + (" a node" if plan.replicate > 1 else ""))
        elif plan.replicate > 1:
            axes.append("copies")
        kind = " x ".join(axes) or "one device"
        return f"{kind}, {' and '.join(plan.offload)} in host memory" if plan.offload else kind


def with_few_launches(
    settings: Settings, cluster: Cluster, base: Base, offload: tuple[str, ...] = ()
) -> Iterator[Plan]:
    """As `candidates`, recorded or compiled as a whole where a run would be with nothing said."""
    work = Workload(base.parameters, 0, steady=settings.model.family == "llama")
    batch = settings.train.global_batch
    return (with_graphs(plan, work, cluster, batch) for plan in candidates(settings, cluster, offload))


def candidates(settings: Settings, cluster: Cluster, offload: tuple[str, ...] = ()) -> Iterator[Plan]:
    """Every sensible plan that fits the job's sizes; what the job says of a plan's parts is kept.

    Tensor stays inside a node. A rank's micro-batch is a power of two.

    Args:
        offload: what all of them have in host memory.
    """
    said = settings.plan
    kept = said.model_dump(include=set(said.model_fields_set)) if said is not None else {}
    for keys in _degrees(settings, cluster):
        for more in _parts(settings, keys):
            try:
                plan = Plan.model_validate(effective({"offload": offload, **keys, **more, **kept}))
                check(settings.job, plan, cluster)
            except ValueError:
                continue
            yield plan


def _degrees(settings: Settings, cluster: Cluster) -> Iterator[dict[str, Any]]:
    devices, node, family = cluster.num_devices, cluster.devices_per_node, settings.model.family
    length = settings.data.seq_len
    decoder = family in ("llama", "moe") or family.startswith("hf:")
    tensors = _powers(node) if decoder else [1]
    contexts = (
        [size for size in _powers(MOST_CONTEXT) if size == 1 or length // size >= LONG // 2]
        if decoder
        else [1]
    )
    for tensor in tensors:
        for context in contexts:
            for pipeline in _powers(MOST_PIPELINE) if decoder else [1]:
                inner = tensor * context * pipeline
                if devices % inner or (pipeline > 1 and inner // pipeline > node):
                    continue
                base = {"tensor": tensor, "context": context, "pipeline": pipeline}
                base = {key: value for key, value in base.items() if value > 1}
                for spread in _spreads(
                    devices // inner, max(1, node // (tensor * context)), pipeline > 1, context > 1
                ):
                    yield base | spread
                    if family == "moe":
                        yield from _experts(base | spread, node)


def _spreads(ranks: int, near: int, staged: bool, cut: bool) -> Iterator[dict[str, Any]]:
    """How samples are dealt out: copies, shards, and shards near each other with copies between."""
    stages = (1, 3) if staged else (1, 2, 3)
    if ranks == 1:
        yield from ({"zero": zero, "replicate": 1} for zero in stages) if cut else [{"replicate": 1}]
        return
    if not cut:
        yield {"replicate": ranks}
    for zero in stages:
        yield {"shard": ranks, "zero": zero}
        if 1 < near < ranks and ranks % near == 0:
            yield {"replicate": ranks // near, "shard": near, "zero": zero}


def _experts(keys: dict[str, Any], node: int) -> Iterator[dict[str, Any]]:
    sharing = keys.get("shard", 1) * keys.get("context", 1) * keys.get("tensor", 1)
    for degree in _powers(node):
        if degree > 1 and sharing % degree == 0:
            yield keys | {"expert": degree}


def _parts(settings: Settings, keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
    data = keys.get("replicate", 1) * keys.get("shard", 1)
    batch, pipeline = settings.train.global_batch, keys.get("pipeline", 1)
    if batch % data:
        return
    local = batch // data
    schedules: list[dict[str, Any]] = [{}]
    if pipeline > 1:
        schedules = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b"}]
    for micro_batch in _powers(min(local, MOST_MICRO_BATCH)):
        if local % micro_batch or (pipeline > 1 and local // micro_batch < pipeline):
            continue
        for recompute in AGAIN:
            for schedule in schedules:
                yield {"micro_batch": micro_batch, "recompute": recompute} | schedule


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(0, most).bit_length()) if 1 << exponent <= most]


def guess(plan: Plan, base: Base, settings: Settings, costs: Costs) -> Guess:
    """What a plan may take, scaled from `base`."""
    state = _state_bytes(plan, base, settings)
    micro_batch = plan.micro_batches(settings.train.global_batch)[1]
    shared = plan.tensor * plan.context
    kept = base.activation_bytes * micro_batch / shared * KEPT_SHARE[plan.recompute]
    if plan.recompute_every > 1:
        kept *= plan.recompute_every / 2
    moved = _host_bytes(plan, base, settings)
    return Guess(plan, state, state + kept + CONTEXT_BYTES, moved, _step_s(plan, base, settings, costs))


def _state_bytes(plan: Plan, base: Base, settings: Settings) -> float:
    """Of masters, gradients and two moments in fp32, and the compute type's copies that are there at once: see docs/plan.md."""
    narrow = 2 if settings.train.precision in NARROW else 4
    held = base.parameters / (
        plan.tensor * plan.pipeline * plan.expert
    )  # at least: what is no expert is not cut by expert
    zero, cut = plan.zero_stage, plan.cut
    kept = {"optimizer", "parameters"} - set(plan.offload)
    moments = 0 if settings.optimizer.name == "sgd" or "optimizer" not in kept else 8
    bytes_of = {
        0: 8 + moments,
        1: (4 + moments) / cut + 4 + narrow,
        2: (8 + moments) / cut + narrow,
        3: (8 + moments) / cut,
    }
    blocks = 2 * narrow * base.block_parameters / (plan.tensor * plan.expert) if zero == 3 else 0
    if "parameters" not in kept:  # masters, and gradients where they are reduced
        bytes_of[zero] -= 8 / cut if zero != 1 else 4 / cut  # ZeRO-1 adds them up on the device
    moved = BUCKETS_BYTES if len(kept) < 2 else 0
    return held * bytes_of[zero] + blocks + moved


def _host_bytes(plan: Plan, base: Base, settings: Settings) -> float:
    moments = 0 if settings.optimizer.name == "sgd" or "optimizer" not in plan.offload else 8
    masters = 4 if "parameters" in plan.offload else 0
    return (moments + masters) * _kept(plan, base)


def _step_s(plan: Plan, base: Base, settings: Settings, costs: Costs) -> float:
    count, size = plan.micro_batches(settings.train.global_batch)
    halvings = math.log2(plan.tensor)
    work = base.compute_s * size / (plan.tensor * plan.context * plan.pipeline)
    work *= AGAIN[plan.recompute] * (1 + SMALLER * halvings)
    work += _tensor_s(plan, base, size, costs)
    bubble = (plan.pipeline - 1) / plan.stages_per_rank * work if plan.pipeline > 1 else 0.0
    computing = count * work + bubble
    return (
        computing
        + max(0.0, _sharding_s(plan, base, settings, costs, count) - HIDDEN * computing)
        + _update_s(plan, base, costs)
        + _moving_s(plan, base, costs, count)
    )


def _ranks(plan: Plan, axis: str) -> tuple[int, ...]:
    """The ranks of an axis that rank 0 is among."""
    step = 1
    for other in ("tensor", "context", "shard", "replicate", "pipeline"):
        if other == axis:
            break
        step *= getattr(plan, other)
    return tuple(range(0, step * getattr(plan, axis), step))


def _tensor_s(plan: Plan, base: Base, size: int, costs: Costs) -> float:
    """Eight gathers or scatters of a block's activations, which hide nothing."""
    if plan.tensor == 1:
        return 0.0
    sent = base.boundary_bytes * size / plan.context
    each = costs.collective("all_gather", sent, _ranks(plan, "tensor"))
    return 8 * each * base.blocks / plan.pipeline


def _sharding_s(plan: Plan, base: Base, settings: Settings, costs: Costs, count: int) -> float:
    narrow = 2 if settings.train.precision in NARROW else 4
    held = base.parameters / (plan.tensor * plan.pipeline * plan.expert)
    found = 0.0
    if plan.cut > 1:
        near = _ranks(plan, "shard") if plan.shard > 1 else _ranks(plan, "context")
        gathers = 2 * count if plan.zero_stage == 3 else 1
        reductions = 1 if plan.zero_stage == 1 or plan.pipeline > 1 else count
        found += gathers * costs.collective("all_gather", narrow * held, near)
        # as shoal.parallel.exchange sends them
        in_16_bits = narrow == 2 and not costs.between_nodes(near) and (plan.zero_stage > 1 or count == 1)
        if in_16_bits and plan.pipeline == 1:
            found += reductions * costs.collective("all_to_all", narrow * held, near)
        else:
            found += reductions * costs.collective("reduce_scatter", 4 * held, near)
    if plan.replicate > 1:
        found += costs.collective("all_reduce", 4 * held / plan.cut, _ranks(plan, "replicate"))
    return found


def _moving_s(plan: Plan, base: Base, costs: Costs, count: int) -> float:
    """Over the link to host memory, of which little is hidden: see docs/plan.md."""
    held = _kept(plan, base)
    moved = 16.0 if "optimizer" in plan.offload else 0.0
    if "parameters" in plan.offload:
        moved += 4 * (2 * count if plan.zero_stage == 3 else 1) + 4 + 4 + 4
    return costs.host_copy(moved * held) if moved else 0.0


def _kept(plan: Plan, base: Base) -> float:
    """Parameters that a rank keeps after all cutting."""
    return (
        base.parameters / (plan.tensor * plan.pipeline * plan.expert) / (plan.cut if plan.zero_stage else 1)
    )


def _update_s(plan: Plan, base: Base, costs: Costs) -> float:
    return costs.moving(36 * _kept(plan, base))
