"""The shard axis: ZeRO-1, 2 and 3 by torch's `fully_shard`, alone or under a replicate axis (hybrid sharding)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from shoal.models.units import Unit, group_by_shared_parameters
from shoal.parallel.precision import Types
from shoal.parallel.unused import is_needed, use_all
from shoal.plan import Plan


def apply_shard(
    model: nn.Module,
    units: list[Unit],
    plan: Plan,
    mesh: DeviceMesh,
    types: Types,
    *,
    cast_unit_inputs: bool,
) -> nn.Module:
    """Cut every parameter over the shard axis, unit by unit, in place.

    A unit's parameters are gathered by one collective while the unit runs. ZeRO-3 frees them again after forward; ZeRO-1
    and 2 keep them until the step's last backward. Gradients are summed, not averaged: `Step` divides once.

    Args:
        units: of the model, or of a larger one that this is a part of.
        cast_unit_inputs: cast floating-point inputs of units to the compute type.
    """
    axes = mesh["replicate", "shard"] if plan.replicate > 1 else mesh["shard"]
    placed = _placement_over(mesh["shard"].size())
    keep = {parameter for parameter in model.parameters() if not is_cut(parameter)}
    there = set(model.modules())
    units = [unit for unit in units if unit.module in there]
    groups = [[unit.module for unit in members] for members in group_by_shared_parameters(model, units)]
    apart = {
        inner for module in there if isinstance(module, FSDPModule) for inner in module.modules()
    }  # experts, on a mesh of their own
    if is_needed() and not getattr(model, "uses_every_parameter", False):
        _use_all(model, groups, apart)
    for modules in groups:
        fully_shard(
            modules[0] if len(modules) == 1 else modules,
            mesh=axes,
            reshard_after_forward=plan.zero_stage == 3,
            mp_policy=_policy(types, cast_unit_inputs),
            offload_policy=_place_of_masters(plan, mesh),
            ignored_params=keep,
            shard_placement_fn=placed,
        )
    fully_shard(
        model,
        mesh=axes,
        reshard_after_forward=False,
        mp_policy=_policy(types, True),
        offload_policy=_place_of_masters(plan, mesh),
        ignored_params=keep,
        shard_placement_fn=placed,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_gradients(module)
    _prefetch(groups)
    return model


def shard_experts(modules: Iterable[nn.Module], plan: Plan, mesh: DeviceMesh, types: Types) -> None:
    """Cut what each rank has of the experts over the ranks that have the same ones; before `apply_shard`, in place.

    Args:
        mesh: of `World.expert_mesh`.
    """
    axes = mesh["replicate", "shard"] if plan.replicate > 1 else mesh["shard"]
    for module in modules:
        if is_needed():
            use_all(module, list(module.modules()))
        fully_shard(
            module,
            mesh=axes,
            reshard_after_forward=plan.zero_stage == 3,
            mp_policy=_policy(types, False),
            offload_policy=_place_of_masters(plan, mesh),
            shard_placement_fn=_placement_over(mesh["shard"].size()),
        )


def sharded_parameters(module: FSDPModule) -> list[Any]:
    """What `fully_shard` keeps of each parameter that it gathers with `module` (torch's FSDPParam).

    Read for what there is no public name: its gathered memory, its padded part, its hooks.
    """
    return [parameter for group in parameter_groups(module) for parameter in group.fsdp_params]


def parameter_groups(module: FSDPModule) -> list[Any]:
    """What `fully_shard` gathers by one collective with `module` (torch's FSDPParamGroup), for which there is no public name."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group]


def groups_of(model: nn.Module) -> list[Any]:
    """The same of all sharded modules in `model`, in one order on all ranks."""
    return [
        g for module in model.modules() if isinstance(module, FSDPModule) for g in parameter_groups(module)
    ]


def parameters_of(group: Any) -> list[nn.Parameter]:
    """Of torch's FSDPParamGroup, as the model has them now."""
    owners = [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(owner.module, owner.param_name) for owner in owners]


def masters_device(plan: Plan, device: torch.device) -> torch.device:
    """Where masters and gradients are between uses."""
    return torch.device("cpu") if "parameters" in plan.offload else device


def _place_of_masters(plan: Plan, mesh: DeviceMesh) -> OffloadPolicy:
    """On a CPU masters are in host memory as it is, and torch's policy asks for an accelerator."""
    on_host = masters_device(plan, torch.device(mesh.device_type)).type != mesh.device_type
    return CPUOffloadPolicy() if on_host else OffloadPolicy()


def _placement_over(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Where parameters are cut: along dim 0, or, where it is too short for all ranks, a later dim that they divide."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        if shape[0] >= ranks:
            return None
        return next((Shard(dim) for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)

    return placement


def _use_all(model: nn.Module, groups: list[list[nn.Module]], apart: set[nn.Module]) -> None:
    in_groups = {module for group in groups for unit in group for module in unit.modules()}
    for unit in (unit for group in groups for unit in group):
        use_all(unit, [module for module in unit.modules() if module not in apart])
    use_all(model, [module for module in model.modules() if module not in in_groups | apart])


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether sharding takes a parameter: integers have no gradient to sum, and a scalar cannot be cut."""
    return parameter.is_floating_point() and parameter.dim() > 0


@torch.no_grad()
def sum_whole_gradients(parameters: Iterable[nn.Parameter], groups: Iterable[dist.ProcessGroup]) -> None:
    """Sum, over all groups in turn, the gradients of trained parameters that sharding left whole. Collective."""
    whole = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not whole:
        return
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in whole])
    for group in groups:
        dist.all_reduce(flat, group=group)
    for parameter, gradient in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def is_gathered(group: Any) -> bool:
    """Whether torch's FSDPParamGroup has gathered, or is about to."""
    return group._all_gather_result is not None or not group.is_sharded


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the model's own are the masters again: what is saved, hashed and updated.

    Masters in host memory are waited for, so that the host can read them.
    """
    for module in (*model.modules(), *model.__dict__.get("_shoal_roots", ())):
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                if group._all_gather_result is not None:  # for a forward that did not come
                    group.finalize_backward()
                gather: Any = group.unshard.__self__
                if gather is not group:  # see `direct`: weights may be written now
                    gather.forget()
            module.reshard()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
            torch.accelerator.current_stream().synchronize()
            break


def _policy(types: Types, cast_inputs: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=types.compute, reduce_dtype=types.master, cast_forward_inputs=cast_inputs
    )


def _sum_gradients(module: Any) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    _count_unused(module)


def _count_unused(module: Any) -> None:
    """Reduce the gradients of unused parameters too, as zeros; for torch before 2.13 see `shoal.parallel.unused`."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)


def _prefetch(groups: list[list[nn.Module]]) -> None:
    """Gather the next unit while one runs. Said explicitly, since a backward inside the loss clears the recorded order."""
    for one, following in pairwise(groups):
        _sharded_in(one)[0].set_modules_to_forward_prefetch(_sharded_in(following))
        _sharded_in(following)[0].set_modules_to_backward_prefetch(_sharded_in(one))


def _sharded_in(group: list[nn.Module]) -> list[Any]:
    """The unit that is gathered for a group, and the experts inside."""
    inside = [module for unit in group for module in unit.modules() if isinstance(module, FSDPModule)]
    return [group[0], *(module for module in inside if module is not group[0])]
