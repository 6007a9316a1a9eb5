"""Gradient zero for parameters that a forward left out, for torch before 2.13.

There `fully_shard` reduces the gradients that a rank happens to have: ranks that took other branches would add up different
parameters. torch 2.13 has `set_reduce_scatter_unused_params` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
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
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return (gradients[0], *zeros)
