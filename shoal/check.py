"""Checks across nouns: does this plan fit this job and these devices? Made before any process starts; needs no torch."""

from __future__ import annotations

import math

from shoal.cluster import Cluster
from shoal.job import FAMILIES, Job
from shoal.models.moe_presets import MoeDims, resolve_moe
from shoal.models.presets import LlamaDims, resolve
from shoal.plan import V_SHAPED, Plan
from shoal.words import fewer_stages


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Refuse what cannot run.

    Raises:
        ValueError: naming the key, its value, and values that would work.
    """
    _check_devices(plan, cluster)
    _check_batch(job, plan)
    check_model(job)
    _check_pipeline(job, plan)
    if job.model.family == "llama":
        dims = resolve(job.model)
        _check_experts(None, plan)
        _check_decoder(dims, {"model.ffn": dims.ffn}, job, plan)
        _check_tied(dims, plan)
    elif job.model.family == "moe":
        moe = resolve_moe(job.model)
        _check_experts(moe, plan)
        _check_decoder(moe.base, {"model.shared_experts x model.expert_ffn": moe.base.ffn}, job, plan)
        _check_tied(moe.base, plan)


def check_model(job: Job) -> None:
    """Refuse a model table that describes no model.

    Raises:
        ValueError: naming the key, its value, and values that would work.
    """
    family = job.model.family
    if family in FAMILIES and job.model.options:
        raise ValueError(
            f"model.options = {job.model.options} is for a model of your own; family {family!r} takes its dimensions as keys of "
            "[model]"
        )
    if family == "llama":
        resolve(job.model)
    elif family == "moe":
        resolve_moe(job.model)


def _check_devices(plan: Plan, cluster: Cluster) -> None:
    if plan.world_size != cluster.num_devices:
        raise ValueError(
            f"the plan is {plan.describe()}: {plan.world_size} ranks, but the cluster has {_devices(cluster.num_devices)} "
            f"({cluster.describe()}); degrees must multiply to {cluster.num_devices}, such as {_would_work(plan, cluster)}; "
            "plan=auto chooses them"
        )


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _would_work(plan: Plan, cluster: Cluster) -> str:
    axis, other = ("shard", "replicate") if plan.shard > 1 else ("replicate", "shard")
    rest = plan.world_size // getattr(plan, axis)
    if cluster.num_devices % rest == 0 and cluster.num_devices // rest > 1:
        return f"plan.{axis}={cluster.num_devices // rest}"
    return f"plan.{axis}={cluster.num_devices} plan.{other}=1 with all other degrees 1"


def _check_batch(job: Job, plan: Plan) -> None:
    batch, degree = job.train.global_batch, plan.all_shares
    if batch % degree and plan.shares:
        raise ValueError(
            f"train.global_batch = {batch} cannot be dealt out by plan.shares = {list(plan.shares)}; use a multiple of their "
            f"sum, {degree} (such as {-(-batch // degree) * degree}), or other shares"
        )
    if batch % degree:
        works = [size for size in range(1, batch + 1) if batch % size == 0]
        raise ValueError(
            f"train.global_batch = {batch} cannot be dealt out evenly to replicate x shard = {degree} ranks; use a multiple "
            f"of {degree} (such as {-(-batch // degree) * degree}), or replicate x shard one of {works}"
        )
    local = batch // degree
    if plan.micro_batch is not None and local % plan.micro_batch:
        works = [size for size in range(1, local + 1) if local % size == 0]
        raise ValueError(
            f"plan.micro_batch = {plan.micro_batch} does not divide a rank's {local} samples "
            f"(train.global_batch / ({'sum of plan.shares' if plan.shares else 'replicate x shard'})); these do: {works}"
        )


def _check_experts(dims: MoeDims | None, plan: Plan) -> None:
    if dims is None and plan.expert > 1:
        raise ValueError(
            f"plan.expert = {plan.expert} shares experts, and model.family = 'llama' has none; use plan.expert=1, or "
            "model.family=moe"
        )
    if dims is not None and dims.experts % plan.expert:
        works = [degree for degree in range(1, dims.experts + 1) if dims.experts % degree == 0]
        raise ValueError(
            f"plan.expert = {plan.expert} does not divide model.experts = {dims.experts}; these do: {works}"
        )


def _check_decoder(dims: LlamaDims, widths: dict[str, int], job: Job, plan: Plan) -> None:
    """What Llama and its relatives share; `widths` of feed-forward parts by the keys that decide them."""
    for name, value in {"model.heads": dims.heads, **widths, "model.vocab": dims.vocab}.items():
        if value % plan.tensor:
            counts = [value] if name == "model.vocab" else [dims.heads, *widths.values()]
            works = [degree for degree in range(1, min(value, 64) + 1) if not any(n % degree for n in counts)]
            larger = -(-value // plan.tensor) * plan.tensor
            unused = (
                f"; or set model.vocab={larger}, whose last rows are not used"
                if name == "model.vocab"
                else ""
            )
            raise ValueError(
                f"plan.tensor = {plan.tensor} does not divide {name} = {value}; these do: {works}{unused}"
            )
    if max(dims.kv_heads, plan.tensor) % min(dims.kv_heads, plan.tensor):
        raise ValueError(
            f"plan.tensor = {plan.tensor} and model.kv_heads = {dims.kv_heads}: one must divide the other, so that each rank has "
            "whole key/value heads, or shares one"
        )
    if plan.stages > dims.layers:
        raise ValueError(
            f"plan.pipeline = {plan.pipeline} makes {plan.stages} stages (plan.schedule = {plan.schedule!r}), more than "
            f"model.layers = {dims.layers} blocks; {fewer_stages(plan, dims.layers)}"
        )
    _check_sequence(dims, job, plan)


def _check_sequence(dims: LlamaDims, job: Job, plan: Plan) -> None:
    """The sequence is cut over context (twice, for the ring, so that causal attention is balanced), then over tensor."""
    length, chunks = job.data.seq_len, 2 if plan.context_by == "ring" and plan.context > 1 else 1
    pieces = math.lcm(plan.context * chunks, plan.context * plan.tensor)
    if length % pieces:
        raise ValueError(
            f"plan.context = {plan.context} and plan.tensor = {plan.tensor} need a multiple of {pieces} as data.seq_len, and "
            f"it is {length}; such as {max(1, length // pieces) * pieces} and {-(-length // pieces) * pieces}"
        )
    heads = dims.heads // plan.tensor
    if plan.context_by == "all_to_all" and heads % plan.context:
        raise ValueError(
            f"plan.context = {plan.context} by all_to_all does not divide a rank's {heads} heads (model.heads / plan.tensor); "
            "use plan.context_by=ring"
        )


def _check_pipeline(job: Job, plan: Plan) -> None:
    if plan.pipeline == 1:
        return
    count, _ = plan.micro_batches(job.train.global_batch)
    local = job.train.global_batch // plan.all_shares
    fits = [
        size
        for size in range(1, local + 1)
        if local % size == 0 and not _schedule_refuses(plan, local // size)
    ]
    if why := _schedule_refuses(plan, count):
        do = (
            f"plan.micro_batch={fits[-1]} would do"
            if fits
            else f"use a train.global_batch of {plan.all_shares * plan.stages}"
        )
        raise ValueError(
            f"plan.schedule = {plan.schedule!r} with {count} micro-batches of a rank's {local} samples: {why}; {do}"
        )


def _check_tied(dims: LlamaDims, plan: Plan) -> None:
    if plan.pipeline > 1 and dims.tied and plan.schedule in V_SHAPED:
        raise ValueError(
            f"plan.schedule = {plan.schedule!r} puts the first and last stage on one rank, which this version does not do for a "
            "tied head and embedding; use another schedule, or model.tied=false"
        )


def _schedule_refuses(plan: Plan, count: int) -> str:
    """Why a schedule cannot run so many micro-batches, if it cannot."""
    if plan.schedule.startswith("interleaved") and count % max(1, count // plan.pipeline):
        return f"they must be a multiple of the {count // plan.pipeline} rounds of plan.pipeline = {plan.pipeline}"
    if plan.schedule in ("1f1b", "dualpipev") and count < plan.stages:
        return f"it needs at least as many as the {plan.stages} stages"
    return ""
