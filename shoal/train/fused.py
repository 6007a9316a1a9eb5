"""torch's fused AdamW and SGD over plain tensors: how they are made, what they remember, and one update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.job import Optimizer
from shoal.parallel.places import Ready
from shoal.parallel.sums import cast_into
from shoal.train.adamw import Tables, takes
from shoal.train.adamw import update as update_adamw


def make(
    settings: Optimizer, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """A torch optimizer over `parts`; weight decay is for parameters of two or more dims, whatever shape their parts have."""
    decayed = [part for name, part in parts.items() if parameters[name].dim() >= 2]
    plain = [part for name, part in parts.items() if parameters[name].dim() < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if group
    ]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    return torch.optim.SGD(
        groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=True
    )


def kinds(settings: Optimizer) -> tuple[str, ...]:
    """State tensors that are shaped like their parameter."""
    if settings.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if settings.momentum else ()


def update(
    optimizer: torch.optim.Optimizer,
    lr: float,
    divide_by: Tensor,
    skip: Tensor,
    tables: Tables | None = None,
    ready: Ready[Tensor] | None = None,
) -> None:
    """Update with gradients divided by `divide_by`, or do nothing where `skip` is 1; no wait for the device.

    `grad_scale` and `found_inf` are how torch's GradScaler talks to fused optimizers.

    Args:
        tables: kept from one update to the next: updates are then by a kernel of ours where there is one (see `adamw`).
        ready: what is left of parts beside.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        if divide_by.dtype == torch.float64:  # fused kernels read the scale as fp32, which would round it
            for part in group["params"]:
                part.grad = part.grad / divide_by if part.grad is not None else None
    scale = torch.ones_like(divide_by) if divide_by.dtype == torch.float64 else divide_by
    if tables is not None and takes(optimizer):
        update_adamw(optimizer, tables, scale.float(), skip.float(), ready)
        return
    optimizer.grad_scale = scale.float()  # pyrefly: ignore[missing-attribute]
    optimizer.found_inf = skip.float()  # pyrefly: ignore[missing-attribute]
    optimizer.step()
    if ready is not None:
        _leave(ready, [part for group in optimizer.param_groups for part in group["params"]])


def _leave(ready: Ready[Tensor], parts: list[Tensor]) -> None:
    """As the kernel leaves it of the parts that it updates."""
    cast = [part for part in parts if part in ready.places]
    if cast:
        cast_into([ready.places[part] for part in cast], [part.detach().view(-1) for part in cast])
    measured = [part for part in parts if part in ready.largest]
    if measured:
        sizes = torch._foreach_norm([part.detach() for part in measured], float("inf"))
        torch._foreach_copy_([ready.largest[part] for part in measured], list(sizes))
