"""Mixtures of experts of transformers for the expert axis: rows sorted by expert, computed by transformers' own code.

transformers gives a module of stacked experts all tokens and where each goes. Under an expert axis rows travel, and a rank has
some of the experts. So the module gets a method `rows(x, counts)`, which calls what transformers made with one expert for each
row and weight 1, and its forward sorts, asks `rows` and weighs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.grouped import take_rows

CALL = "rows"
GIVEN = 3  # tokens, the experts of each, their weights


def mixtures(model: nn.Module) -> dict[str, nn.Module]:
    """By path, modules whose parameters are stacked by expert and whose forward is told where tokens go."""
    return {path: module for path, module in model.named_modules() if _is_mixture(module)}


def _is_mixture(module: Any) -> bool:
    count = getattr(module, "num_experts", None)
    own = list(module.parameters())
    return (
        isinstance(count, int)
        and hasattr(module, "_is_expert_parallel")  # of transformers' use_experts_implementation
        and bool(own)
        and all(parameter.dim() > 1 and parameter.shape[0] == count for parameter in own)
        and not any(True for _ in module.buffers())
        and (CALL in vars(module) or len(inspect.signature(module.forward).parameters) == GIVEN)
    )


def by_rows(module: Any, ranks: int) -> None:
    """Let a mixture be cut over `ranks` ranks: `rows(x, counts)` stands between its forward and its experts, in place.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    if CALL in vars(module):
        return
    every = module.num_experts
    if every % ranks:
        works = [degree for degree in range(1, every + 1) if every % degree == 0]
        raise ValueError(
            f"plan.expert = {ranks} does not divide the {every} experts of the model; these do: {works}"
        )
    of_transformers = module.forward
    module.num_experts = every // ranks  # those that its code goes through

    def rows(x: Tensor, counts: Tensor) -> Tensor:
        """What experts make of their rows (N, D), which are sorted by expert, `counts` (experts here,) of each."""
        if not len(x):  # gradients of zero, and not none
            return x + sum((parameter.sum() * 0).to(x.dtype) for parameter in module.parameters())
        experts = torch.arange(len(counts), device=x.device)
        expert = experts.repeat_interleave(counts, output_size=len(x))[:, None]
        return of_transformers(x, expert, x.new_ones(len(x), 1))

    def forward(x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """x: (..., D), N tokens. expert, weight: (N, K), of each token."""
        copies = expert.shape[-1]
        order = expert.flatten().argsort(stable=True)
        inverse = order.argsort()
        counts = expert.new_zeros(every)
        counts.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten()))
        made = getattr(module, CALL)(take_rows(x.flatten(0, -2), order, inverse, copies), counts)
        made = take_rows(made, inverse, order).view(-1, copies, x.shape[-1])
        mixed = (made * weight.view(-1, copies, 1)).sum(1).to(x.dtype)
        return mixed if x.dim() == mixed.dim() else mixed.view_as(x)

    setattr(module, CALL, rows)
    module.forward = forward
