"""A model that fails, in its own code, under one axis."""

from __future__ import annotations

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
