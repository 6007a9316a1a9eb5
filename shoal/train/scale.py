"""fp16's dynamic loss scale, on the device and equal on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """Halves after a step that was not finite; doubles after `growth` finite ones in a row (Micikevicius et al. 2018)."""

    def __init__(self, initial: float, growth: int, *, device: torch.device) -> None:
        self.value = torch.tensor(initial, dtype=torch.float32, device=device)
        self._finite = torch.tensor(0, dtype=torch.int64, device=device)
        self._growth = growth

    def update(self, overflowed: Tensor) -> None:
        """Take in a step; `overflowed` is a boolean scalar. In place, without a wait for the device."""
        self._finite.add_(1).mul_(~overflowed)
        grow = self._finite >= self._growth
        factor = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0))
        self.value.mul_(factor).clamp_(min=1.0)
        self._finite.mul_(~grow)

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale.value": self.value, "loss_scale.finite_steps": self._finite}
