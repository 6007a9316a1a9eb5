"""Checks across nouns: does this plan fit this job and these devices? Made before any process starts; needs no torch."""

from __future__ import annotations

from shoal.cluster import Cluster
from shoal.job import Job
from shoal.models.presets import LlamaDims, resolve
from shoal.plan import Plan, require_supported


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Refuse what cannot run.

    Raises:
        ValueError: naming the key, its value, and values that would work.
    """
    _check_devices(plan, cluster)
    _check_batch(job, plan)
    check_model(job)
    if job.model.family == "llama":
        _check_llama(resolve(job.model), job, plan)
    require_supported(plan)


def check_model(job: Job) -> None:
    """Refuse a model table that describes no model.

    Raises:
        ValueError: naming the key, its value, and values that would work.
    """
    if job.model.family == "llama":
        if job.model.options:
            raise ValueError(
                f"model.options = {job.model.options} is for a model of your own; family 'llama' takes its dimensions as "
                "keys of [model]"
            )
        resolve(job.model)


def _check_devices(plan: Plan, cluster: Cluster) -> None:
    if plan.world_size != cluster.num_devices:
        raise ValueError(
            f"the plan is {plan.describe()}: {plan.world_size} ranks, but the cluster has {cluster.num_devices} devices "
            f"({cluster.describe()}); degrees must multiply to {cluster.num_devices}, such as {_would_work(plan, cluster)}; "
            "plan=auto chooses them"
        )


def _would_work(plan: Plan, cluster: Cluster) -> str:
    axis, other = ("shard", "replicate") if plan.shard > 1 else ("replicate", "shard")
    rest = plan.world_size // getattr(plan, axis)
    if cluster.num_devices % rest == 0 and cluster.num_devices // rest > 1:
        return f"plan.{axis}={cluster.num_devices // rest}"
    return f"plan.{axis}={cluster.num_devices} plan.{other}=1 with all other degrees 1"


def _check_batch(job: Job, plan: Plan) -> None:
    batch, degree = job.train.global_batch, plan.data_degree
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
            f"(train.global_batch / (replicate x shard)); these do: {works}"
        )


def _check_llama(dims: LlamaDims, job: Job, plan: Plan) -> None:
    for name, value in (("heads", dims.heads), ("kv_heads", dims.kv_heads)):
        if value % plan.tensor:
            works = [degree for degree in range(1, value + 1) if value % degree == 0]
            raise ValueError(
                f"plan.tensor = {plan.tensor} does not divide model.{name} = {value}; these do: {works}"
            )
    if plan.pipeline > dims.layers:
        raise ValueError(
            f"plan.pipeline = {plan.pipeline} is more stages than model.layers = {dims.layers} blocks; "
            f"use at most {dims.layers}"
        )
    if job.data.seq_len % plan.context:
        length = job.data.seq_len
        works = [degree for degree in range(1, min(length, 64) + 1) if length % degree == 0]
        raise ValueError(
            f"plan.context = {plan.context} does not divide data.seq_len = {length}; these do: {works}"
        )
