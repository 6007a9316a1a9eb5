"""What happens around a forward, in one order from the inside out: recompute by operator, compile, cast, local parameters of a
tensor axis, recompute of all. These wrap functions, and are not hooks, so that a second run goes through them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from shoal.models.units import Unit
from shoal.parallel.precision import Types, cast_while_running
from shoal.parallel.recompute import recomputed
from shoal.parallel.tensor import with_local_parameters
from shoal.plan import Plan
from shoal.tensors import cast_floats

Forward = Callable[..., Any]


def wrap_forwards(
    model: nn.Module,
    units: list[Unit],
    again: set[nn.Module],
    plan: Plan,
    types: Types,
    device: torch.device,
    *,
    apart: Iterable[nn.Module],
) -> None:
    """Wrap the forward of every unit and of the model, in place.

    Args:
        again: the units that are run again in backward.
        apart: modules inside units that see to their parameters themselves.
    """
    compiled = plan.compiles(device.type)
    # under sharding what is gathered is cast
    cast = types.compute if plan.only_copies and types.compute != types.master else None
    cast_inputs = bool(getattr(model, "cast_unit_inputs", True))
    if compiled == "model":
        _wrap_whole(model, units, again, plan, cast, cast_inputs=cast_inputs)
    else:
        own = {module for each in apart for module in each.modules()}
        for unit in units:
            _wrap_unit(
                unit.module,
                plan,
                cast,
                compiled=bool(compiled),
                again=unit.module in again,
                own=own,
                cast_inputs=cast_inputs,
            )
        in_units = {module for unit in units for module in unit.module.modules()}
        rest = [module for module in model.modules() if module not in in_units]
        model.forward = _with_parameters(model.forward, rest, plan, cast, own=own, cast_inputs=True)
    if plan.only_copies and cast is None:  # inputs of another type, which sharding casts too
        model.forward = wraps(model.forward)(partial(_call_cast, model.forward, types.compute))


def _wrap_unit(
    unit: nn.Module,
    plan: Plan,
    cast: torch.dtype | None,
    *,
    compiled: bool,
    again: bool,
    own: set[nn.Module],
    cast_inputs: bool,
) -> None:
    inside = compiled and again and plan.recompute == "selective"
    forward = recomputed(unit.forward, unit, plan, compiled=True) if inside else unit.forward
    if compiled:
        forward = torch.compile(forward)
    forward = _with_parameters(forward, list(unit.modules()), plan, cast, own=own, cast_inputs=cast_inputs)
    if again and not inside:
        forward = recomputed(forward, unit, plan, compiled=False)
    unit.forward = forward


def _with_parameters(
    forward: Forward,
    modules: list[nn.Module],
    plan: Plan,
    cast: torch.dtype | None,
    *,
    own: set[nn.Module],
    cast_inputs: bool,
) -> Forward:
    """A forward that sees its modules' parameters as it computes with them: cast, and this rank's part."""
    modules = [module for module in modules if module not in own]
    if cast is not None:
        forward = cast_while_running(forward, modules, cast, cast_inputs=cast_inputs)
    return with_local_parameters(forward, modules) if plan.tensor > 1 else forward


def _wrap_whole(
    model: nn.Module,
    units: list[Unit],
    again: set[nn.Module],
    plan: Plan,
    cast: torch.dtype | None,
    *,
    cast_inputs: bool,
) -> None:
    """One graph of the whole model. What wraps its units is compiled with them."""
    for unit in (unit.module for unit in units):
        forward = unit.forward
        if cast is not None and cast_inputs:
            forward = wraps(forward)(partial(_call_cast, forward, cast))
        unit.forward = recomputed(forward, unit, plan, compiled=True) if unit in again else forward
    whole = torch.compile(model.forward, fullgraph=True)
    modules = list(model.modules())
    model.forward = _with_parameters(whole, modules, plan, cast, own=set(), cast_inputs=True)


def _call_cast(forward: Forward, cast: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast_floats((args, kwargs), cast)
    return forward(*args, **kwargs)
