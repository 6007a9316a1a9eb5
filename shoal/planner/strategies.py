"""The strategies that a textbook has names for, as plans of a job on a number of devices; needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import AXES, Plan, effective, runs_text

MOST_COUNTS = 4  # numbers of devices that are shown: each is as many simulations as there are strategies
DEGREES = (*AXES, "expert")
OWN = "own"


class Strategy(NamedTuple):
    """A way to spread a model, with a name that people know."""

    key: str
    name: str
    says: str
    """what a device holds, in a sentence"""
    keys: Callable[[Cluster], dict[str, Any]]
    """the plan's keys on a cluster; raises ValueError where the strategy makes no sense"""
    families: tuple[str, ...] = ()
    """of models that have it; () is any"""
    least_nodes: int = 1


def strategies_of(settings: Settings, cluster: Cluster) -> list[Strategy]:
    """Strategies that a job's kind of model can have on a cluster, or on a part of it."""
    family = settings.model.family.split(":")[0]
    return [
        each
        for each in STRATEGIES
        if cluster.nodes >= each.least_nodes and (not each.families or family in each.families)
    ]


def clusters_of(cluster: Cluster) -> list[Cluster]:
    """A cluster and smaller ones like it: parts of a node, or for several nodes one device, one node, some nodes and all."""
    node, nodes = cluster.devices_per_node, cluster.nodes
    if nodes == 1:
        counts = _spread([part for part in range(1, node + 1) if node % part == 0])
    else:
        between = [part * node for part in range(2, nodes) if nodes % part == 0]
        middle = sorted(between, key=lambda count: abs(math.log(count / node) - math.log(nodes) / 2))[:1]
        counts = sorted({1, node, *middle, cluster.num_devices})
    return [_of(cluster, count) for count in counts]


def _spread(counts: list[int]) -> list[int]:
    """At most `MOST_COUNTS` of them, the ends included."""
    if len(counts) <= MOST_COUNTS:
        return counts
    last = MOST_COUNTS - 1
    return [counts[round(place * (len(counts) - 1) / last)] for place in range(MOST_COUNTS)]


def _of(cluster: Cluster, count: int) -> Cluster:
    nodes = max(1, count // cluster.devices_per_node)
    return cluster.model_copy(update={"nodes": nodes, "devices_per_node": count // nodes})


def plan_of(strategy: Strategy, settings: Settings, cluster: Cluster, micro_batch: int) -> Plan:
    """A strategy's plan; what the job says of compile, recompute and offload is kept.

    Args:
        micro_batch: samples at a time, or fewer where a rank has not so many, or a pipeline needs more micro-batches.

    Raises:
        ValueError: the strategy makes no sense on so many devices.
    """
    said = settings.plan
    kept = {"compile", "recompute", "recompute_keep", "recompute_every", "offload", "context_by"}
    base = said.model_dump(include=said.model_fields_set & kept) if said is not None else {}
    keys = {"replicate": 1, **strategy.keys(cluster)}  # at least one degree, so that none is chosen
    if "recompute" in keys:
        base = {key: value for key, value in base.items() if not key.startswith("recompute")}
    plan = Plan.model_validate(effective(base | keys))
    return plan.model_copy(
        update={"micro_batch": _micro_batch(settings.train.global_batch, plan, micro_batch)}
    )


def _micro_batch(global_batch: int, plan: Plan, wanted: int) -> int:
    local = global_batch // plan.data_degree
    most = min(wanted, local // plan.stages)
    return max((size for size in range(1, most + 1) if local % size == 0), default=1)


def words_of(plan: Plan, settings: Settings) -> str:
    """The words that make a plan on the command line, beside a job file that may say another.

    Example:
        >>> words_of(Plan(shard=8, zero=3), Settings())
        'plan.shard=8 plan.zero=3'
    """
    said = settings.plan.model_fields_set if settings.plan is not None else set()
    default, words = Plan(), []
    for key in Plan.model_fields:
        value = getattr(plan, key)
        if value is None and key in said:  # nothing can be unsaid, so it is said as it is in force
            value = {"zero": plan.zero_stage, "virtual_stages": plan.stages_per_rank}.get(key)
        if value is not None and (value != getattr(default, key) or key in said):
            words.append(f"plan.{key}={runs_text(value) or 'none' if key == 'shares' else _word(value)}")
    return (
        " ".join(words)
        if any(word[5:].partition("=")[0] in DEGREES for word in words)
        else " ".join(["plan.replicate=1", *words])
    )


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def in_force(plan: Plan, global_batch: int) -> dict[str, Any]:
    """What a plan comes to: two plans that say the same in different words have the same."""
    return plan.model_dump(exclude={"recompute_keep", "schedule"}) | {
        "zero": plan.zero_stage,
        "micro_batch": plan.micro_batches(global_batch)[1],
        "schedule": plan.schedule if plan.pipeline > 1 else None,
        "virtual_stages": plan.stages_per_rank if plan.pipeline > 1 else 1,
        "recompute_keep": plan.recompute_keep if plan.recompute == "selective" else None,
    }


def _several(cluster: Cluster, least: int = 2) -> int:
    count = cluster.num_devices
    if count == 1:
        raise ValueError("one device has nobody to share with")
    if count < least:
        raise ValueError(f"it takes {least} devices or more, and there are {count}")
    return count


def _one(cluster: Cluster) -> dict[str, Any]:
    if cluster.num_devices > 1:
        raise ValueError(f"there are {cluster.num_devices} devices; choose 1 to see it")
    return {}


def _sharded(zero: int, **more: Any) -> Callable[[Cluster], dict[str, Any]]:
    return lambda cluster: {"shard": _several(cluster), "zero": zero, **more}


def _hybrid(cluster: Cluster) -> dict[str, Any]:
    if cluster.nodes == 1:
        raise ValueError("it takes several nodes, with a copy on each")
    return {"replicate": cluster.nodes, "shard": cluster.devices_per_node, "zero": 3}


def _tensor(cluster: Cluster) -> dict[str, Any]:
    count = _several(cluster)
    if cluster.nodes > 1:
        raise ValueError(
            "ranks of tensor talk in every block and stay inside a node; across nodes see ZeRO-3 + tensor"
        )
    return {"tensor": count}


def _sharded_tensor(cluster: Cluster) -> dict[str, Any]:
    count = _several(cluster, 4)
    tensor = cluster.devices_per_node if cluster.nodes > 1 else 2
    if count % tensor or tensor == 1:
        raise ValueError(f"{count} devices are no product of shard and tensor = {tensor}")
    return {"shard": count // tensor, "zero": 3, "tensor": tensor}


def _pipeline(cluster: Cluster) -> dict[str, Any]:
    count = _several(cluster)
    if cluster.nodes == 1:
        return {"pipeline": count, "schedule": "1f1b"}
    return {"pipeline": cluster.nodes, "shard": cluster.devices_per_node, "zero": 1, "schedule": "1f1b"}


DECODERS = ("llama", "moe", "hf")
STRATEGIES = (
    Strategy("one", "One device", "One device holds everything, and does all the work.", _one),
    Strategy(
        "copies",
        "DDP copies",
        "Every device holds the whole model, its gradients and the optimizer; only samples are dealt out.",
        lambda cluster: {"replicate": _several(cluster)},
    ),
    Strategy(
        "zero1",
        "ZeRO-1",
        "The optimizer's state is cut: each device updates its part of the parameters. The rest is whole.",
        _sharded(1),
    ),
    Strategy(
        "zero2",
        "ZeRO-2",
        "Optimizer and gradients are cut. Parameters are gathered once a step and stay whole in it.",
        _sharded(2),
    ),
    Strategy(
        "zero3",
        "ZeRO-3 / FSDP",
        "Parameters, gradients and optimizer are cut: a block's parameters are whole only while it runs.",
        _sharded(3),
    ),
    Strategy(
        "zero3_recompute",
        "ZeRO-3 + recompute",
        "As ZeRO-3, and each block keeps its input alone: what is in it is computed again in backward.",
        _sharded(3, recompute="full"),
    ),
    Strategy(
        "hybrid",
        "ZeRO-3 a node",
        "Each node holds one copy, cut over its devices: only gradients cross the slow links between nodes.",
        _hybrid,
        least_nodes=2,
    ),
    Strategy(
        "tensor",
        "Tensor",
        "Every matrix is cut: each device holds a slice of each block, and of its activations.",
        _tensor,
        DECODERS,
    ),
    Strategy(
        "zero3_tensor",
        "ZeRO-3 + tensor",
        "Matrices are cut over a few near devices, and the slices over the rest by ZeRO-3.",
        _sharded_tensor,
        DECODERS,
    ),
    Strategy(
        "pipeline",
        "Pipeline",
        "Devices hold consecutive blocks and pass activations on; the first ones hold more micro-batches.",
        _pipeline,
    ),
    Strategy(
        "experts",
        "ZeRO-3 + experts",
        "Devices hold different experts and send tokens to them; all else is cut by ZeRO-3.",
        lambda cluster: {"shard": _several(cluster), "zero": 3, "expert": cluster.num_devices},
        ("moe",),
    ),
)
