"""Tensors inside nested tuples, lists and dicts, as batches, arguments and outputs of models are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in nested tuples, lists and dicts, cast."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []
    )


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`change` applied to every tensor in nested tuples, lists and dicts; other values are kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value
