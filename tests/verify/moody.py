"""A model that fails, in its own code, under one axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.layout import Layout
from shoal.plan import Plan
from tests.train import dropout


class Moody(nn.Module):
    """Another model, with a layout that is not to be had for `tensor`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dropout.build()

    def layout(self, plan: Plan) -> Layout:
        if plan.tensor > 1:
            raise RuntimeError("not today")
        return Layout()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def build() -> nn.Module:
    return Moody()


class Plain(nn.Module):
    """One without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def plain() -> nn.Module:
    return Plain()


def mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """The mean of a micro-batch by weights of its samples' classes, which is no mean of samples."""
    return F.cross_entropy(output, target, weight=output.new_tensor([1.0, 5.0, 25.0]))


def narrow(output: Tensor, target: Tensor) -> Tensor:
    """With weights in fp32, whatever the output is in."""
    return F.cross_entropy(output, target, weight=torch.tensor([1.0, 1.0, 1.0]))
