"""Awkward modules of a user's: shared, frozen, unused and integer parameters, buffers, odd shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Awkward(nn.Module):
    """Width 5, so that nothing divides by 2 or 4; initialised in its own __init__."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(Layer(5) for _ in range(3))
        self.layers[2].up = self.layers[0].up  # pyrefly: ignore - two units share a module
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dims: less than one row a rank
        self.frozen = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.order = nn.Parameter(torch.randperm(5), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("offset", torch.linspace(0, 1, 5), persistent=False)
        for layer in self.layers:
            nn.init.trunc_normal_(layer.down.weight, std=0.3)  # pyrefly: ignore

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[..., self.order] * self.frozen + self.offset
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 7, (samples, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
