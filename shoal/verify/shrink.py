"""A job and a plan made small enough to be run here on a few CPU ranks, with every axis and every kind of layer still in it."""

from __future__ import annotations

import math

from shoal.config import Settings
from shoal.data.text import HF, SourceKind, source_kind
from shoal.job import FLOAT8, Model, Precision
from shoal.models.moe_presets import MoeDims, resolve_moe
from shoal.models.presets import LlamaDims, resolve
from shoal.plan import AXES, Plan, effective

MOST_RANKS = 8
HEAD_WIDTH = 8
STEPS = 4


def shrink_plan(plan: Plan, most: int = MOST_RANKS) -> Plan:
    """The plan with smaller degrees, if it needs more than `most` ranks: no axis is lost that can be kept.

    Example:
        >>> shrink_plan(Plan(replicate=16, shard=8, tensor=8)).describe()
        'replicate 2 x tensor 2 x shard 2 (ZeRO-3)'
    """
    degrees = {axis: getattr(plan, axis) for axis in AXES}
    while math.prod(degrees.values()) > most:
        axis = max(degrees, key=lambda name: (degrees[name] > 2, degrees[name], name == "replicate"))
        degrees[axis] = max(1, _largest_divisor(degrees[axis]))
    smaller = plan.model_copy(update=degrees)
    uneven = len(set(plan.shares)) > 1 and smaller.data_degree > 1
    shares = (2, *[1] * (smaller.data_degree - 1)) if uneven else ()
    keys = smaller.model_dump() | {"expert": math.gcd(plan.expert, smaller.sharing), "shares": shares}
    return Plan.model_validate(effective(keys))


def _largest_divisor(number: int) -> int:
    return next(divisor for divisor in range(number // 2, 0, -1) if number % divisor == 0)


def shrink(settings: Settings, plan: Plan, steps: int = STEPS) -> tuple[Settings, Plan]:
    """Small settings of `steps` steps and a plan for them.

    Layers, width, vocabulary and sequence become the smallest that the plan's axes divide; of a transformers model those that its
    configuration names, and its weights are new ones. A model of the user's own stays as it is. Text becomes random tokens; a
    dataset of the user's own is kept. Each rank has a few micro-batches.
    """
    count = max(2, 2 * plan.pipeline if plan.pipeline > 1 else 2)
    size = min(2, plan.micro_batch or 2)
    small = plan.model_copy(update={"micro_batch": size, "compile": False})
    batch = plan.all_shares * count * size
    train = settings.train.model_copy(update={"global_batch": batch, "steps": steps, "eval_every": 0})
    optimizer = settings.optimizer.model_copy(update={"warmup": min(2, settings.optimizer.warmup)})
    changed: dict[str, object] = {"train": train, "optimizer": optimizer}
    width = small_width(train.precision, plan)
    if settings.model.family == "llama":
        dims = small_dims(resolve(settings.model, settings.data.vocab), plan, width)
        changed["model"] = Model.model_validate({"family": "llama", **dims._asdict()})
        changed["data"] = settings.data.model_copy(update=small_data(dims, plan))
    elif settings.model.family == "moe":
        moe = small_moe_dims(resolve_moe(settings.model, settings.data.vocab), plan, width)
        changed["model"] = moe_table(moe)
        changed["data"] = settings.data.model_copy(update=small_data(moe.base, plan))
    elif settings.model.family.startswith(HF):
        changed |= _small_hugging_face(settings, plan)
    elif source_kind(settings.data.source) is not SourceKind.USER:
        changed["data"] = settings.data.model_copy(update={"source": "synthetic"})
    return settings.model_copy(update=changed), small


def _small_hugging_face(settings: Settings, plan: Plan) -> dict[str, object]:
    """A small model of the same kind with new weights, and random tokens of its vocabulary."""
    from shoal.verify.huggingface import small_options, vocabulary

    family, theirs = settings.model.family, source_kind(settings.data.source) is SourceKind.USER
    length = settings.data.seq_len if theirs else small_length(plan)
    width = small_width(settings.train.precision, plan)
    options = small_options(
        family, settings.model.options, plan, length, head_width=width, same_tokens=theirs
    )
    model = settings.model.model_copy(update={"options": options})
    if theirs:
        return {"model": model}
    data = {
        "source": "synthetic",
        "vocab": vocabulary(family, options),
        "seq_len": length,
        "tokenizer": "bytes",
    }
    return {"model": model, "data": settings.data.model_copy(update=data)}


def small_width(precision: Precision, plan: Plan) -> int:
    """Of which every size is a multiple: float8 multiplies parts of 16 and more alone."""
    return 16 * plan.tensor if precision in FLOAT8 else HEAD_WIDTH


def small_dims(dims: LlamaDims, plan: Plan, head_width: int = HEAD_WIDTH) -> LlamaDims:
    """Small dimensions of the same kind: grouped key/value heads stay grouped, a tied head tied."""
    heads = math.lcm(4, plan.tensor * (plan.context if plan.context_by == "all_to_all" else 1))
    grouped = dims.kv_heads < dims.heads
    return dims._replace(
        dim=heads * head_width,
        layers=max(2, plan.stages),
        heads=heads,
        kv_heads=math.gcd(heads, max(2, plan.tensor // 2)) if grouped else heads,
        ffn=math.lcm(head_width, plan.tensor) * 5,
        vocab=math.lcm(4, plan.tensor) * 66,
    )


def small_moe_dims(dims: MoeDims, plan: Plan, head_width: int = HEAD_WIDTH) -> MoeDims:
    """As `small_dims`: shared experts stay shared, and each token goes to as many experts as before, up to two."""
    base = small_dims(dims.base, plan, head_width)
    return dims._replace(
        base=base if dims.base.ffn else base._replace(ffn=0),
        experts=math.lcm(4, plan.expert),
        top_k=min(2, dims.top_k),
        expert_ffn=base.ffn,
    )


def moe_table(dims: MoeDims) -> Model:
    """The model table that says all of these dimensions."""
    base = {name: value for name, value in dims.base._asdict().items() if name != "ffn"}
    own = {name: value for name, value in dims._asdict().items() if name != "base"}
    shared = dims.base.ffn // dims.expert_ffn
    return Model.model_validate({"family": "moe", "shared_experts": shared, **base, **own})


def small_data(dims: LlamaDims, plan: Plan) -> dict[str, object]:
    """Random tokens of a model's vocabulary."""
    return {
        "source": "synthetic",
        "vocab": max(257, dims.vocab),
        "seq_len": small_length(plan),
        "tokenizer": "bytes",
    }


def small_length(plan: Plan) -> int:
    """A short sequence that the plan's axes divide."""
    return math.lcm(2 * plan.context, plan.context * plan.tensor) * 3
