"""Gradient zero for parameters that a forward left out, for torch before 2.13.

There `fully_shard` reduces the gradients that a rank happens to have: ranks that took other branches would add up different
parameters. torch 2.13 has `set_reduce_scatter_unused_params` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def is_needed() -> bool:
    """Whether this torch leaves out what a rank did not use."""
    return not hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def use_all(module: nn.Module, owners: Sequence[nn.Module]) -> None:
    """Make a module's output depend on every trained parameter that `owners` hold, with gradient zero."""
    module.forward = _using_all(module.forward, owners)


def _using_all(forward: Callable[..., Any], owners: Sequence[nn.Module]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        leaves, shape = tree_flatten(output)
        at = next(
            (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad), None
        )
        if at is None:
            return output
        held = (p for owner in owners for p in owner.parameters(recurse=False) if p.requires_grad)
        leaves[at] = _UseAll.apply(leaves[at], *dict.fromkeys(held))
        return tree_unflatten(leaves, shape)

    return run


class _UseAll(torch.autograd.Function):
    """Its first argument; in backward the gradient of that, and zeros for the others."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [_zeros_like(parameter) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *(make() for make in ctx.zeros))


def _zeros_like(parameter: Tensor) -> Callable[[], Tensor]:
    """Makes zeros like a parameter, which may be freed by then; one cut over tensor or expert gets a gradient cut alike."""
    if not isinstance(parameter, DTensor):
        return partial(torch.zeros, parameter.shape, dtype=parameter.dtype, device=parameter.device)
    part = _zeros_like(parameter.to_local())
    mesh, placements, shape, stride = (
        parameter.device_mesh,
        parameter.placements,
        parameter.shape,
        parameter.stride(),
    )
    return lambda: DTensor.from_local(part(), mesh, placements, run_check=False, shape=shape, stride=stride)
