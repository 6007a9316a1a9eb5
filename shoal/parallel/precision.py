"""Compute types: what parameters are cast to while they are used, in which type gradients are summed.

Masters and gradient sums are fp32 under bf16 and fp16: with bf16 masters AdamW loses small updates entirely. Under
sharding, `fully_shard` casts what it gathers; a whole model is cast here, unit by unit, to the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.job import Precision
from shoal.tensors import cast_floats


class Types(NamedTuple):
    """Types of a run."""

    master: torch.dtype
    """parameters, gradients and optimizer state"""
    compute: torch.dtype
    """parameters and activations while a module runs"""


def types_of(precision: Precision) -> Types:
    """The types that a job's precision means."""
    return {
        "fp64": Types(torch.float64, torch.float64),
        "fp32": Types(torch.float32, torch.float32),
        "bf16": Types(torch.float32, torch.bfloat16),
        "fp16": Types(torch.float32, torch.float16),
        "float8": Types(torch.float32, torch.bfloat16),
        "float8_rowwise": Types(torch.float32, torch.bfloat16),
        "float8_gather": Types(torch.float32, torch.bfloat16),
    }[precision]


def cast_while_running(
    forward: Callable[..., Any], modules: list[nn.Module], compute: torch.dtype, *, cast_inputs: bool
) -> Callable[..., Any]:
    """`forward`, with the parameters that `modules` hold directly replaced by casts for as long as it runs.

    Gradients flow through the casts into the masters, in the masters' type. This wraps the function, and is not a
    hook, so that recomputation in backward sees the casts too.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs:
            args, kwargs = cast_floats((args, kwargs), compute)
        with _casted(modules, compute):
            return forward(*args, **kwargs)

    return run


@contextmanager
def _casted(modules: list[nn.Module], compute: torch.dtype) -> Iterator[None]:
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    casts: dict[nn.Parameter, torch.Tensor] = {}  # a tied parameter is cast once
    try:
        for module in modules:
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if not parameter.is_floating_point() or not parameter.dim() or parameter.dtype == compute:
                    continue
                if parameter not in casts:
                    casts[parameter] = parameter.to(compute)
                del module._parameters[name]
                object.__setattr__(module, name, casts[parameter])
                held.append((module, name, parameter))
        yield
    finally:
        for module, name, parameter in held:
            object.__delattr__(module, name)
            module._parameters[name] = parameter
