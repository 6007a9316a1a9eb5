"""`parallelize`: one model and one plan into a model that this rank trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shoal.job import Precision
from shoal.parallel.context import apply_context, cut_batch
from shoal.parallel.initialise import InitParameter, build, initialiser_of, is_meta, materialise
from shoal.parallel.layout import layout_of
from shoal.parallel.precision import Types, cast_while_running, types_of
from shoal.parallel.replicate import apply_replicate, core
from shoal.parallel.shard import apply_shard, is_cut
from shoal.parallel.tensor import apply_tensor, with_local_parameters
from shoal.parallel.units import find_units
from shoal.plan import Plan, require_supported
from shoal.world import World


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    world: World,
    *,
    precision: Precision = "fp32",
    seed: int = 0,
) -> nn.Module:
    """Spread a model over the ranks of `world` as `plan` says, with equal weights for every plan.

    Args:
        model: a builder (a class, or a function without arguments), whose weights then depend on `seed` alone; or a module,
            whose weights on rank 0 are taken by all.

    Returns:
        A module that is called like the original. Sharded parameters are `DTensor`s.

    Raises:
        ValueError: the plan's world size is not the world's, or an axis is not there.

    Example:
        model = shoal.parallelize(MyModel, shoal.Plan(shard=4), world, precision="bf16")
    """
    require_supported(plan)
    mesh = world.parameter_mesh(plan)
    types = types_of(precision)
    built = model if isinstance(model, nn.Module) else build(model, seed)
    _to_master(built, types.master)
    if isinstance(model, nn.Module):
        _take_from_rank_0(built, world)
    cast_unit_inputs = bool(getattr(built, "cast_unit_inputs", True))
    spread = _apply_axes(built, plan, world)
    _prepare_units(built, plan, types, world.device, cast_unit_inputs)
    if not plan.only_copies:
        apply_shard(built, plan, mesh, types, cast_unit_inputs=cast_unit_inputs)
    init_parameter = initialiser_of(built)
    if is_meta(built):
        materialise(built, _required(init_parameter, built), world.device, seed)
    _move_rest(built, world.device)
    built.__dict__["_shoal_spread"] = spread
    if not plan.only_copies:
        return built
    return apply_replicate(
        built, plan, mesh, may_skip_parameters=not getattr(built, "uses_every_parameter", False)
    )


class Spread(NamedTuple):
    """What a training step needs to know of how a model was spread."""

    counts: bool = True
    """this rank's losses count: others that compute the same do not"""
    coordinates: tuple[int, ...] = ()
    """the rank's place on the axes along which ranks share samples: their dropout differs"""
    alike: int = 1
    """ranks that compute the same gradient of what no axis cuts"""
    cut_inputs: Callable[[Any], Any] = lambda data: data
    """from a micro-batch to this rank's part of its sequences"""


def spread_of(model: nn.Module) -> Spread:
    """How a model was spread: as one, if it was not."""
    return core(model).__dict__.get("_shoal_spread", Spread())


def _apply_axes(model: nn.Module, plan: Plan, world: World) -> Spread:
    """Tensor and context parallelism, which need the model's layout."""
    if plan.tensor == 1 and plan.context == 1:
        return Spread()
    layout = layout_of(model)
    if layout is None:
        axis = "tensor" if plan.tensor > 1 else "context"
        raise ValueError(
            f"plan.{axis} = {getattr(plan, axis)}, but {type(model).__name__} has no layout that says how it can be cut; give "
            "it one (shoal.Layout, docs/models.md), or spread it over replicate and shard"
        )
    place, cut_inputs = plan.coordinates(world.rank), Spread().cut_inputs
    if plan.context > 1:
        sequence = apply_context(model, plan, world.mesh(plan).get_group("context"), layout)
        cut_inputs = partial(cut_batch, sequence=sequence, layout=layout)
    if plan.tensor > 1:
        apply_tensor(model, plan, world.parameter_mesh(plan), layout)
    return Spread(place["tensor"] == 0, (place["context"], place["tensor"]), plan.tensor, cut_inputs)


@torch.no_grad()
def _to_master(model: nn.Module, master: torch.dtype) -> None:
    """Give floating-point parameters and buffers the master type; `Module.to` would make complex ones real too."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise ValueError(
                f"parameter {name!r} is complex, which the fused optimizers do not take; hold torch.view_as_real of it "
                "and use torch.view_as_complex in forward"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            # contiguous: sharding cuts memory, and does not take channels_last
            tensor.data = tensor.data.to(master).contiguous()


def _required(init_parameter: InitParameter | None, model: nn.Module) -> InitParameter:
    if init_parameter is None:
        raise TypeError(
            f"{type(model).__name__} is on the meta device and cannot be initialised by name: it has buffers, or no "
            "init_parameter(name, tensor, generator). Pass its class or a function that builds it, so that it can be "
            "built with weights"
        )
    return init_parameter


@torch.no_grad()
def _take_from_rank_0(model: nn.Module, world: World) -> None:
    if world.size == 1 or is_meta(model):
        return
    for tensor in (*model.parameters(), *model.buffers()):
        staged = tensor.detach().to(world.device)
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)


def _prepare_units(
    model: nn.Module, plan: Plan, types: Types, device: torch.device, cast_unit_inputs: bool
) -> None:
    """Compile, cast and recompute, in this order from the inside out, by wrapping each unit's forward."""
    cast = plan.only_copies and types.compute != types.master  # sharding casts what it gathers
    compiled = plan.compile if plan.compile is not None else device.type == "cuda"
    units = [unit.module for unit in find_units(model)]
    in_units = {module for unit in units for module in unit.modules()}
    for unit in units:
        forward = torch.compile(unit.forward) if compiled else unit.forward
        if cast:
            forward = cast_while_running(
                forward, list(unit.modules()), types.compute, cast_inputs=cast_unit_inputs
            )
        if plan.tensor > 1:
            forward = with_local_parameters(forward, list(unit.modules()))
        if plan.recompute == "full":
            forward = wraps(forward)(
                partial(checkpoint, forward, use_reentrant=False, context_fn=partial(_contexts, unit))
            )
        unit.forward = forward
    rest = [module for module in model.modules() if module not in in_units]
    if cast:
        model.forward = cast_while_running(model.forward, rest, types.compute, cast_inputs=True)
    if plan.tensor > 1:
        model.forward = with_local_parameters(model.forward, rest)


def _contexts(unit: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first run of a unit and of its recomputation."""
    return nullcontext(), _buffers_kept(unit)


@contextmanager
def _buffers_kept(unit: nn.Module) -> Iterator[None]:
    """Undo what a second run does to buffers: running statistics are to see each batch once."""
    before = [(buffer, buffer.detach().clone()) for buffer in unit.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@torch.no_grad()
def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move to the device what sharding leaves alone: buffers and integer parameters, or the whole of a plain model."""
    if isinstance(model, FSDPModule):
        for parameter in model.parameters():
            if not is_cut(parameter):
                parameter.data = parameter.data.to(device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
    else:
        model.to(device)


@torch.no_grad()
def synchronise_buffers(model: nn.Module, world: World) -> None:
    """Make floating-point buffers that differ between ranks (running statistics) their mean over all ranks. Collective.

    Those that are equal are kept to the bit: a sum over 3 ranks, divided by 3, would let constants drift.
    """
    for buffer in model.buffers():
        if world.size == 1 or not buffer.is_floating_point():
            continue
        least, most, mean = buffer.clone(), buffer.clone(), buffer.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        buffer.copy_(torch.where(least == most, buffer, mean / world.size))


@contextmanager
def accumulation(model: nn.Module, plan: Plan, *, last: bool) -> Iterator[None]:
    """Around the forward and backward of a micro-batch: send only what the plan sends before the last one."""
    if isinstance(model, FSDPModule):
        reduces_each = plan.zero_stage >= 2
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or reduces_each)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or plan.zero_stage == 3)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
