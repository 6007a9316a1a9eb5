"""float8: the linears of blocks multiply in 8 bits, by torchao, and everything else is as in bf16.

"float8" scales a tensor by its largest element, "float8_rowwise" each row by its own, which is slower and closer to bf16.
"float8_gather" is "float8" whose weights are also gathered in 8 bits: see `gather8`.
Weights, activations and gradients are cast just before they are multiplied; masters, sums, norms, attention, embedding and head
keep their types, and so do experts. CPUs compute the same in wider types, which is slow: for tests and `verify`.

Sources: Micikevicius et al. 2022 (FP8 formats, arXiv:2209.05433); torchao.float8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.data.text import import_extra
from shoal.job import Precision
from shoal.parallel.transpose import transpose_by_tiles
from shoal.plan import Plan

RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise", "float8_gather": "tensorwise"}
ALIGNMENT = 16  # elements of each matrix's dims that the kernel wants
OLDEST = (8, 9)  # CUDA's compute capability: Ada and Hopper


def apply_float8(blocks: Iterable[nn.Module], precision: Precision, plan: Plan, device: torch.device) -> None:
    """Let the linears of blocks multiply in float8, in place; nothing for another precision.

    A linear whose dims are no multiples of 16 stays as it is, whatever the plan.

    Raises:
        ValueError: torchao is not installed, the device has no float8, no linear is large enough, or the tensor axis makes one
            too small.
    """
    if precision not in RECIPES:
        return
    _require_device(precision, device)
    config, convert = _config(precision, device), _torchao(precision).convert_to_float8_training
    if device.type == "cuda" and torch.version.hip is None:
        transpose_by_tiles()
    blocks = list(blocks)
    found = [
        (path, module) for block in blocks for path, module in block.named_modules() if _is_aligned(module)
    ]
    for path, linear in found:
        _require_aligned_parts(path, linear, plan)
    for block in blocks:
        convert(block, config=config, module_filter_fn=lambda module, path: _is_aligned(module))
    if not found:
        raise ValueError(
            f'train.precision = "{precision}", but no linear of the model\'s blocks has dims that are multiples of {ALIGNMENT}; '
            'use "bf16"'
        )


def _config(precision: Precision, device: torch.device) -> Any:
    recipe = _torchao(precision).Float8LinearConfig.from_recipe_name(RECIPES[precision])
    # padding is for micro-batches whose tokens are no multiple of 16
    return dataclasses.replace(recipe, emulate=device.type == "cpu", pad_inner_dim=True)


def _torchao(precision: Precision) -> Any:
    return import_extra("torchao.float8", f'train.precision = "{precision}"', extra="float8")


def _require_device(precision: Precision, device: torch.device) -> None:
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < OLDEST
    ):
        raise ValueError(
            f'train.precision = "{precision}" needs compute capability {OLDEST[0]}.{OLDEST[1]} (Ada, Hopper or later), and '
            f'{torch.cuda.get_device_name(device)} has {".".join(map(str, torch.cuda.get_device_capability(device)))}; use "bf16"'
        )


def _is_aligned(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not (
        module.in_features % ALIGNMENT or module.out_features % ALIGNMENT
    )


def _require_aligned_parts(path: str, linear: Any, plan: Plan) -> None:
    shape, step = list(linear.weight.shape), ALIGNMENT * plan.tensor
    if any(size % step for size in shape):
        raise ValueError(
            f"plan.tensor = {plan.tensor} leaves a rank parts of {path} {shape} that float8 cannot multiply: dims must be "
            f'multiples of {step}; use a smaller plan.tensor, or train.precision = "bf16"'
        )
