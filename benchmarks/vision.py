"""A vision transformer of one's own, for measuring: ViT-L/16 on random images (Dosovitskiy et al., 2021, arXiv:2010.11929).

    shoal bench step benchmarks/jobs/vit_large.toml plan.replicate=4 train.global_batch=256
    torchrun --nproc-per-node=4 -m benchmarks.vision_by_hand --steps=20

The second trains the same model from the same weights by DistributedDataParallel or FSDP2, compiled, with no framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES, SIDE, DISTINCT = 1000, 224, 512
PER_EPOCH = 1 << 20


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) to the same."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    """Patches of 16 x 16 pixels, blocks, the mean of their outputs, a linear head."""

    def __init__(self, dim: int = 1024, layers: int = 24, heads: int = 16, side: int = SIDE) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, stride=16)
        self.position = nn.Parameter(torch.zeros(1, (side // 16) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, side, side) bytes to (B, CLASSES) logits."""
        pixels = images.to(self.patch.weight.dtype) / 128 - 1
        x = self.patch(pixels).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Random bytes and classes; DISTINCT of them, again and again, so that reading costs what it costs from memory."""

    def __init__(self, side: int, first: int) -> None:
        generator = torch.Generator().manual_seed(first)
        self._pixels = torch.randint(
            0, 256, (DISTINCT, 3, side, side), dtype=torch.uint8, generator=generator
        )
        self._classes = torch.randint(0, CLASSES, (DISTINCT,), generator=generator)

    def __len__(self) -> int:
        return PER_EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pixels[index % DISTINCT], self._classes[index % DISTINCT]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def datasets(side: int = SIDE) -> tuple[Images, Images]:
    """(train, held out); what `data.source` names."""
    return Images(side, 0), Images(side, 1)


def build(dim: int = 1024, layers: int = 24, heads: int = 16, side: int = SIDE) -> nn.Module:
    """What `model.family` names; `model.options` are its arguments."""
    return Vit(dim, layers, heads, side)
