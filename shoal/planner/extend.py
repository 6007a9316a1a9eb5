"""A deep model from a shallow one: most blocks of a model are alike, so a few are simulated and the middle one is repeated.

What is repeated is the record of the step, event by event, and not a number: so peaks, and what the allocator makes of them, are
those of the deep model. Where a record does not repeat so, the whole model is simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.cluster import Cluster
from shoal.models.units import Unit, find_units
from shoal.parallel.initialise import build_on_meta
from shoal.plan import Plan
from shoal.planner.fake_device import outside
from shoal.planner.repeat import NotPeriodicError, extend
from shoal.planner.simulate import Work, simulate
from shoal.planner.stages import Boundary
from shoal.planner.trace import Trace

KEPT = 6  # blocks: with fewer, prefetching and offload do not come to their rhythm


def simulate_extended(
    work: Work, plan: Plan, cluster: Cluster, rank: int = 0, *, boundary: Boundary | None = None
) -> Trace:
    """As `simulate`, of few blocks where that gives the same; of stages of a pipeline all are simulated."""
    total = alike_blocks(work) if _repeats(plan) else 0
    period = plan.recompute_every
    kept = KEPT + 2 * (period - 1)
    kept += (total - kept) % period
    if total <= kept:
        return simulate(work, plan, cluster, rank, boundary=boundary)
    shallow = simulate(work._replace(build=shortened(work.build, kept)), plan, cluster, rank)
    try:
        return extend(shallow, kept, total, period)
    except NotPeriodicError:
        return simulate(work, plan, cluster, rank)


def _repeats(plan: Plan) -> bool:
    """Whether memory is had block by block: copies are sent, and moments moved, in pieces that do not end where blocks do."""
    copies = plan.only_copies and plan.replicate > 1
    return plan.pipeline == 1 and not copies and not {"optimizer", "parameters"} & set(plan.offload)


def shallowest(work: Work) -> Work:
    """The same with the fewest blocks that are still known as blocks, where they are alike."""
    return work._replace(build=shortened(work.build, 2)) if alike_blocks(work) > 2 else work


def alike_blocks(work: Work, *, numbered: bool = True) -> int:
    """How many blocks a model has in one list that are all alike; 0 if they are not, or it cannot be built without storage.

    Args:
        numbered: those that know their own number are alike all the same.
    """
    model = build_on_meta(work.build)
    units = find_units(model) if model is not None else []
    if len({unit.name.rpartition(".")[0] for unit in units}) != 1 or model is None:
        return 0
    container = model.get_submodule(units[0].name.rpartition(".")[0])
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(units):
        return 0
    first = _signature(units[0], numbered)
    return len(units) if all(_signature(unit, numbered) == first for unit in units[1:]) else 0


def _signature(unit: Unit, numbered: bool) -> list[Any]:
    """What a block is made of; two with the same compute the same on inputs of the same shape."""
    found: list[Any] = []
    for name, module in unit.module.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, str | bool | int | float | tuple)
            and not (numbered and ("idx" in key or "index" in key))
        }
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        tensors = [(key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in own]
        found.append((name, type(module), sorted(plain.items(), key=lambda item: item[0]), tensors))
    return found


def shortened(build: Callable[[], nn.Module], kept: int) -> Callable[[], nn.Module]:
    """A builder of the model with its first blocks alone; it is built outside of the simulated world, which takes less time."""

    def shorter() -> nn.Module:
        with outside():
            model = build_on_meta(build)
        if model is None:
            raise NotPeriodicError
        container: Any = model.get_submodule(find_units(model)[0].name.rpartition(".")[0])
        del container[kept:]
        return model._apply(_anew)

    return shorter


@torch.no_grad()
def _anew(tensor: Tensor) -> Tensor:
    """A tensor of the world that one is in, like one from elsewhere."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
