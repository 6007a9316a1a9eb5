"""The expert axis: each rank holds some of the experts, and rows go to them and come back by all-to-all.

The axis re-uses ranks that have different tokens anyway: `plan.expert` neighbours among shard x context x tensor (with sequence
parallelism ranks of the tensor axis have different tokens, too). Experts are not cut over the tensor axis: the ranks that are
left, shard x context x tensor / expert, cut each expert's parameters by ZeRO and add up its gradients, and all of a replica's
tokens reach them. What is not an expert keeps its own meshes.

[Note: experts without rows] Every rank makes the same collectives whatever its router says: a part may be empty, and so may
all of them. An expert that got no row has gradient zero, and not none.

Sources: Lepikhin et al. 2020 (GShard, arXiv:2006.16668); Rajbhandari et al. 2022 (DeepSpeed-MoE, arXiv:2201.05596); Liu et al.
2025 (MoE parallel folding: an expert axis of its own over the dense axes' ranks, arXiv:2504.14960).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.layout import Layout
from shoal.models.grouped import rows_of, take_rows
from shoal.parallel.collectives import all_to_all, exchange_rows
from shoal.parallel.host import Mail
from shoal.parallel.layout import modules_named
from shoal.parallel.tensor import local_part, use_as, with_local_parameters
from shoal.plan import Plan
from shoal.simulated import is_simulated

GroupedForward = Callable[[Tensor, Tensor], Tensor]
"""From rows (N, D) sorted by expert and the number of each to as many rows."""


def apply_expert(model: nn.Module, plan: Plan, mesh: DeviceMesh, layout: Layout) -> list[nn.Module]:
    """Cut a model's experts over the expert axis, in place; `shard_experts` then cuts what each rank has.

    Args:
        mesh: of `World.expert_mesh`.

    Returns:
        The modules whose parameters are now on this mesh.

    Raises:
        ValueError: the degree does not divide the experts of a module.
    """
    axis = mesh["expert"]
    found = modules_named(model, layout.experts)
    for path, module in found.items():
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                _require_divisible(f"{path}.{name}", parameter, plan)
                part = distribute_tensor(parameter.detach(), axis, [Shard(0)], src_data_rank=None)
                owner.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
                use_as(owner, name, local_part)
        compute = getattr(module, layout.experts_call)
        compute = _compiled(compute) if plan.compiles(mesh.device_type) else compute
        compute = with_local_parameters(compute, list(module.modules()))
        setattr(module, layout.experts_call, _exchanged(compute, axis.get_group()))
    return list(found.values())


def require_experts(layout: Layout, plan: Plan) -> None:
    """Refuse a layout that names no experts, or a tensor axis without sequence parallelism, whose ranks have the same tokens.

    Raises:
        ValueError: naming what is missing and the degree that would work.
    """
    if not layout.experts:
        raise ValueError(
            f"plan.expert = {plan.expert} shares the experts of a mixture-of-experts model, and the model's layout names none; "
            "use plan.expert = 1"
        )
    if plan.tensor > 1 and layout.sequence_dim is None:
        raise ValueError(
            f"plan.expert = {plan.expert} with plan.tensor = {plan.tensor} needs a layout with sequence_dim, so that ranks of "
            "the tensor axis have different tokens, and the model's has none; use plan.tensor = 1"
        )


def _require_divisible(path: str, parameter: nn.Parameter, plan: Plan) -> None:
    if parameter.dim() == 0 or parameter.shape[0] % plan.expert:
        count = parameter.shape[0] if parameter.dim() else 1
        works = [degree for degree in range(1, count + 1) if count % degree == 0]
        raise ValueError(
            f"plan.expert = {plan.expert} does not divide the {count} experts of {path} (dim 0); these do: {works[:16]}"
        )


def _compiled(forward: GroupedForward) -> GroupedForward:
    """An experts' forward that is compiled once for any number of rows."""
    compiled = torch.compile(forward)

    @wraps(forward)
    def run(x: Tensor, counts: Tensor) -> Tensor:
        # torch compiles 0 and 1 as numbers of their own, in the step in which a rank first gets so few
        if len(x) < 2:
            return forward(x, counts)
        # else the first number of rows is compiled in, and after that a changing one; torch documents mark_dynamic, which
        # raises where code needs a number
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(x, counts)

    return run


def _exchanged(forward: GroupedForward, group: dist.ProcessGroup) -> GroupedForward:
    """An experts' forward for rows of all experts, of which this rank has some."""

    @wraps(forward)
    @torch.compiler.disable  # numbers of rows would be compiled in, and be others in the next step
    def run(x: Tensor, counts: Tensor) -> Tensor:
        mine = counts.view(group.size(), -1)  # (ranks, experts of each): rows from here
        theirs = all_to_all(mine, 0, 0, group)  # (ranks, experts here): rows from each rank
        send, receive = _rows_sent(mine, theirs, len(x))
        order = _by_expert(theirs, sum(receive))
        inverse = order.argsort()
        arrived = take_rows(exchange_rows(x, send, receive, group), order, inverse)
        made = take_rows(forward(arrived, theirs.sum(0)), inverse, order)
        return exchange_rows(made, receive, send, group)

    return run


def _rows_sent(mine: Tensor, theirs: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Rows to each rank and from each rank, in one wait for the device; in a simulated world all ranks have as many."""
    if is_simulated():
        even = rows_of(mine.sum(1), rows)
        return even, even
    send, receive = Mail().send(torch.stack((mine.sum(1), theirs.sum(1)))).read()
    return send, receive


def _by_expert(counts: Tensor, rows: int) -> Tensor:
    """The order by expert, then rank, of rows that come by rank, then expert: `counts` (ranks, experts) of each."""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)
