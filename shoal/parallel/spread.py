"""Tensor, context, expert and pipeline parallelism of one model, and what a step needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from shoal.layout import Layout
from shoal.parallel.context import apply_context, cut_batch
from shoal.parallel.exchange import Exchange
from shoal.parallel.expert import apply_expert, require_experts
from shoal.parallel.layout import layout_of, modules_named
from shoal.parallel.pipeline import Pipeline, apply_pipeline
from shoal.parallel.replicate import core
from shoal.parallel.stages import require_stages
from shoal.parallel.tensor import apply_tensor, require_divisible
from shoal.plan import Plan
from shoal.world import World

if TYPE_CHECKING:
    from shoal.models.huggingface import HuggingFace


class Spread(NamedTuple):
    """What a training step needs to know of how a model was spread."""

    counts: bool = True
    """this rank's losses count: others that compute the same do not"""
    coordinates: tuple[int, ...] = ()
    """the rank's place on the axes along which ranks share samples: their dropout differs"""
    data_groups: tuple[dist.ProcessGroup, ...] = ()
    """groups over which, one after the other, sums over all samples are taken; none: the whole world"""
    cut_inputs: Callable[[Any], Any] = lambda data: data
    """from a micro-batch to this rank's part of its sequences"""
    pipeline: Pipeline | None = None
    token_groups: tuple[dist.ProcessGroup, ...] = ()
    """groups over which, one after the other, counts of tokens are summed; none: the whole world"""
    experts: tuple[nn.Module, ...] = ()
    """modules whose parameters are on the expert mesh"""
    exchanges: tuple[Exchange, ...] = ()
    """what sends gradients of sharded units"""

    @property
    def roots(self) -> tuple[nn.Module, ...]:
        """The modules that are called in place of the model, if any: the stages of a pipeline."""
        return tuple(self.pipeline.stages) if self.pipeline else ()


def remember(model: nn.Module, spread: Spread) -> None:
    """Keep with a model how it was spread."""
    model.__dict__["_shoal_spread"] = spread
    model.__dict__["_shoal_roots"] = spread.roots


def spread_of(model: nn.Module) -> Spread:
    """How a model was spread: as one, if it was not."""
    return core(model).__dict__.get("_shoal_spread", Spread())


def require_layout(model: nn.Module, plan: Plan) -> Layout:
    """The layout of a model that a plan cuts over tensor, context, pipeline or expert.

    Raises:
        ValueError: it has none, or refuses an axis of the plan, or the tensor degree does not divide what it must, or
            there are no experts to share, or no stages for every rank.
    """
    layout = layout_of(model, plan)
    if layout is None:
        axis = next(axis for axis in ("tensor", "context", "pipeline", "expert") if getattr(plan, axis) > 1)
        raise ValueError(
            f"plan.{axis} = {getattr(plan, axis)}, but {type(model).__name__} has no layout that says how it can be cut; give "
            "it one (shoal.Layout, docs/models.md), or spread it over replicate and shard"
        )
    for axis, why in layout.refused.items():
        if getattr(plan, axis) > 1:
            raise ValueError(f"plan.{axis} = {getattr(plan, axis)}: {why}")
    if plan.tensor > 1:
        require_divisible(layout, plan)
    if plan.context > 1 and not (layout.attention and layout.inputs):
        raise ValueError(
            f"plan.context = {plan.context} cuts sequences, and the layout of {type(model).__name__} names no attention, or no "
            "inputs that have a sequence; use plan.context = 1"
        )
    if plan.expert > 1:
        require_experts(layout, plan)
    for names in (layout.column, layout.row, layout.region, layout.attention, layout.experts):
        modules_named(model, names)
    if plan.pipeline > 1 and plan.tensor * plan.expert == 1:  # else its stages are known once it is cut
        require_stages(model, plan, layout)
    return layout


def require_sizes(model: HuggingFace, plan: Plan, length: int) -> None:
    """Refuse a plan that does not fit a model of transformers on sequences of `length` tokens.

    Raises:
        ValueError: naming the axis and the reason.
    """
    if plan.tensor * plan.context * plan.pipeline * plan.expert > 1:
        require_layout(model, plan)
        model.check_sizes(plan, length)


def apply_axes(model: nn.Module, plan: Plan, world: World) -> Spread:
    """All axes but replicate and shard: they need the model's layout."""
    if plan.only_copies:
        return Spread()
    mesh = world.parameter_mesh(plan)
    data_groups = tuple(mesh.get_group(axis) for axis in ("replicate", "shard"))
    if plan.tensor * plan.context * plan.pipeline * plan.expert == 1:
        return Spread(data_groups=data_groups, token_groups=data_groups)
    layout = require_layout(model, plan)
    place, cut_inputs = plan.coordinates(world.rank), Spread().cut_inputs
    if plan.context > 1:
        sequence = apply_context(model, plan, world.mesh(plan).get_group("context"), layout)
        cut_inputs = partial(cut_batch, sequence=sequence, layout=layout)
    experts: list[nn.Module] = []
    if plan.expert > 1:
        experts = apply_expert(model, plan, world.expert_mesh(plan), layout)
    token_groups = data_groups
    if plan.tensor > 1:
        apply_tensor(model, plan, mesh, layout)
        # without sequence parallelism all ranks have the same tokens, and count them all: balance looks at proportions
        token_groups += (mesh.get_group("tensor"),)
    pipeline = None
    if plan.pipeline > 1:
        pipeline = apply_pipeline(model, plan, world.mesh(plan).get_group("pipeline"), world.device, layout)
    counts = place["tensor"] == 0 and (pipeline is None or pipeline.has_last)
    # without sequence parallelism ranks of the tensor axis compute alike outside of regions: so they draw alike
    drawing = ("pipeline", "context") if layout.sequence_dim is None else ("pipeline", "context", "tensor")
    shared = tuple(place[axis] for axis in drawing if getattr(plan, axis) > 1)
    there = set(model.modules())
    experts = [module for module in experts if module in there]
    return Spread(counts, shared, data_groups, cut_inputs, pipeline, token_groups, tuple(experts))
