"""A user's own model with dropout, a buffer, a frozen, an unused and an integer parameter; its dataset and loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Net(nn.Module):
    """Eight numbers in, three classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.table = nn.Parameter(torch.arange(8), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1.0
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x * self.frozen)), 0.3, self.training)
        return self.out(x[:, self.table])


def build() -> Net:
    return Net()


class Points(Dataset):
    """64 random points; their class is where their largest of the first three numbers is."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index, :3].argmax()


def dataset() -> Points:
    return Points()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
