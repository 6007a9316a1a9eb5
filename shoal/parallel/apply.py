"""`parallelize`: one model and one plan into a model that this rank trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shoal.job import Precision
from shoal.models.units import Unit, find_units
from shoal.parallel.direct import send_directly
from shoal.parallel.float8 import apply_float8
from shoal.parallel.gather8 import gather_in_float8
from shoal.parallel.initialise import InitParameter, build, initialiser_of, is_meta, materialise
from shoal.parallel.offload import offload_activations
from shoal.parallel.precision import types_of
from shoal.parallel.recompute import recomputed_blocks
from shoal.parallel.replicate import apply_replicate
from shoal.parallel.shard import apply_shard, is_cut, masters_device, shard_experts
from shoal.parallel.spread import apply_axes, remember, spread_of
from shoal.parallel.wrap import wrap_forwards
from shoal.plan import Plan
from shoal.world import World


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    world: World,
    *,
    precision: Precision = "fp32",
    seed: int = 0,
    weights: bool = True,
) -> nn.Module:
    """Spread a model over the ranks of `world` as `plan` says, with equal weights for every plan.

    Args:
        model: a builder (a class, or a function without arguments), whose weights then depend on `seed` alone; or a module,
            whose weights on rank 0 are taken by all.
        weights: False where all are loaded later, since drawing or reading them takes its time; until then those of a builder
            that can be initialised by name are NaN.

    Returns:
        A module that is called like the original. Sharded parameters are `DTensor`s.

    Raises:
        ValueError: the plan's world size is not the world's, or an axis is not there.

    Example:
        model = shoal.parallelize(MyModel, shoal.Plan(shard=4), world, precision="bf16")
    """
    mesh = world.parameter_mesh(plan)
    types = types_of(precision)
    built = model if isinstance(model, nn.Module) else build(model, seed)
    _to_master(built, types.master)
    if isinstance(model, nn.Module):
        _take_from_rank_0(built, world)
    cast_unit_inputs = bool(getattr(built, "cast_unit_inputs", True))
    units = find_units(built)
    blocks = units or [Unit("", built)]
    again = recomputed_blocks(blocks, plan)
    apply_float8((block.module for block in blocks), precision, plan, world.device)
    spread = apply_axes(built, plan, world)
    there = set(built.modules())
    units = [unit for unit in units if unit.module in there]
    blocks = [block for block in blocks if block.module in there]
    wrap_forwards(built, blocks, again, plan, types, world.device, apart=spread.experts)
    if "activations" in plan.offload:
        offload_activations((block.module for block in blocks), world.device)
    if spread.experts:
        shard_experts(spread.experts, plan, world.expert_mesh(plan), types)
    for root in () if plan.only_copies else spread.roots or (built,):
        apply_shard(root, units, plan, mesh, types, cast_unit_inputs=cast_unit_inputs)
    exchanges = send_directly((built, *(spread.roots or ())), plan, world)
    init_parameter = initialiser_of(built)
    if is_meta(built):
        masters = masters_device(plan, world.device)
        init_parameter = _required(init_parameter, built)
        materialise(built, init_parameter, world.device, masters, seed, empty=not weights)
    _move_rest(built, plan, world.device)
    if (
        precision == "float8_gather"
        and not plan.only_copies
        and plan.tensor == 1
        and "parameters" not in plan.offload
    ):
        gather_in_float8(built, spread.pipeline)
    remember(built, spread._replace(exchanges=tuple(exchanges)))
    if not plan.only_copies:
        return built
    return apply_replicate(
        built, plan, mesh, may_skip_parameters=not getattr(built, "uses_every_parameter", False)
    )


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
            f"{type(model).__name__} is on the meta device and cannot be initialised by name: it has no "
            "init_parameter(name, tensor, generator), or a module with buffers and no init_buffers(). Pass its class or a "
            "function that builds it, so that it can be built with weights"
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


@torch.no_grad()
def _move_rest(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Move to the device what sharding leaves alone: buffers and integer parameters, or the whole of a plain model."""
    if not plan.only_copies:
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
    """Make floating-point buffers that differ between ranks (running statistics) their mean over ranks with other samples.

    Collective. Those that are equal are kept to the bit: a sum over 3 ranks, divided by 3, would let constants drift.
    """
    groups = spread_of(model).data_groups or (dist.group.WORLD,)
    for buffer in model.buffers():
        if world.size == 1 or not buffer.is_floating_point():
            continue
        least, most, mean, ranks = buffer.clone(), buffer.clone(), buffer.clone(), 1
        for group in groups:
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(mean, group=group)
            ranks *= dist.get_world_size(group)
        buffer.copy_(torch.where(least == most, buffer, mean / ranks))


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
