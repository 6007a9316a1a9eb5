"""Parts of sharded parameters for thousands of ranks, of which none is made that is not asked for.

`fully_shard` cuts each parameter for all ranks to keep one part, and where it cuts along a later dim than the first, cuts whole
gradients and gathered parameters into a part for each rank to join them in another order. On a device these are views, and one
kernel that copies; here each would be a tensor: minutes for a model over 8,192 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as fsdp_collectives
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor

from shoal.planner.fake_device import replace


class Pieces(Sequence[Tensor]):
    """What `torch.chunk` gives, and empty tensors up to `count`, each made when it is asked for."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self._count = count
        self._size = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        whole = self.tensor.size(self.dim)
        first = min(index * self._size, whole)
        length = min(self._size, whole - first)
        return self.tensor.narrow(self.dim, first, length) if length else self.tensor.new_empty(0)

    def joined(self, dim: int) -> Tensor:
        """A tensor of the shape that they have when they are joined along another dim: as many bytes are read and written."""
        shape = list(self.tensor.shape)
        shape[self.dim] //= self._count
        shape[dim] *= self._count
        return self.tensor.view(shape)


class _Torch:
    """torch, as the module that sends parameters and gradients sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
        even = tensor.size(dim) % chunks == 0 and tensor.is_contiguous()
        return Pieces(tensor, chunks, dim) if even else torch.chunk(tensor, chunks, dim)

    @staticmethod
    def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        parts = tuple(tensors) if not isinstance(tensors, Pieces) else (tensors.joined(dim),)
        return torch.cat(parts, dim) if out is None else torch.cat(parts, dim, out=out)


def simulate_pieces(undo: ExitStack) -> None:
    """Until `undo` is closed, `fully_shard` makes no parts but those that it keeps."""
    replace(undo, fsdp_param, "_chunk_with_empty", Pieces)
    replace(undo, fsdp_collectives, "torch", _Torch())
