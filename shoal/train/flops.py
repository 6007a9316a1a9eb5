"""Floating-point operations of training, for MFU: forward counted, backward taken as twice that, recompute not counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.models.moe_presets import MoeDims, num_moe_parameters
from shoal.models.presets import LlamaDims, num_parameters
from shoal.tensors import map_tensors
from shoal.train.objective import Objective


def llama_flops_per_token(dims: LlamaDims, seq_len: int) -> float:
    """6 for each weight of a matrix multiplication, and attention over the full square, as the field counts MFU."""
    embedding = dims.vocab * dims.dim
    weights = num_parameters(dims) - embedding + (embedding if dims.tied else 0)
    return 6.0 * weights + 12.0 * dims.layers * dims.dim * seq_len


def moe_flops_per_token(dims: MoeDims, seq_len: int) -> float:
    """As Llama's, with the experts that one token goes to."""
    of_experts = num_moe_parameters(dims, active=True) - num_parameters(dims.base)
    return llama_flops_per_token(dims.base, seq_len) + 6.0 * of_experts


def counted_flops(build: Callable[[], nn.Module], objective: Objective, batch: Any) -> float | None:
    """Operations of one forward and backward on `batch`, counted on the meta device; None where it does not run there."""
    try:
        with torch.device("meta"):
            model = build()
        data = map_tensors(batch, lambda tensor: tensor.to("meta"))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            objective.forward(model.to("meta"), data)
    except Exception:  # a model may do anything in forward; MFU is then left out
        return None
    return 3.0 * counter.get_total_flops() or None
