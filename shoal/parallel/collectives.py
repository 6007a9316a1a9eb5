"""Collectives that gradients flow through, on plain local tensors: what tensor, context and expert parallelism are made of.

Each function names what happens forward; its docstring says what happens to gradients. They are made of torch's functional
collectives, which a compiled block keeps in its graph. Those are under a private name (torch.distributed._functional_collectives)
since torch has no public ones that can be traced; DTensor itself is built on them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

# torch 2.13 renames them
_gather_in_order = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter_in_order = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, in rank order along `dim`; nothing for gradients to flow through."""
    if group.size() == 1:
        return x
    if _leads(x, dim):  # no copy is needed where only one row lies before `dim`
        shape = (*x.shape[:dim], x.shape[dim] * group.size(), *x.shape[dim + 1 :])
        return _wait(_gather_in_order(x.reshape(x.shape[dim:]).contiguous(), 0, group)).view(shape)
    # asked for along `dim`, torch 2.11 joins the parts in a function that its compiler does not enter, which cuts a block's graph
    # in two and leaves what comes between to Python: along the first dim, and joined here
    gathered = _wait(_gather_in_order(x.contiguous(), 0, group))
    return torch.cat(gathered.chunk(group.size()), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; nothing for gradients to flow through."""
    if group.size() == 1:
        return x
    if _leads(x, dim):
        shape = (*x.shape[:dim], x.shape[dim] // group.size(), *x.shape[dim + 1 :])
        flat = x.reshape(x.shape[dim:]).contiguous()
        return _wait(_scatter_in_order(flat, "sum", 0, group)).view(shape)
    return _wait(_scatter_in_order(x.contiguous(), "sum", dim, group))


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The sum (or "max") over ranks; nothing for gradients to flow through."""
    return x if group.size() == 1 else _wait(functional.all_reduce(x.contiguous(), op, group))


def all_to_all(x: Tensor, split: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    """Cut along dim `split`, send part i to rank i, and join what comes along dim `joined`; no gradients."""
    n = group.size()
    if n == 1:
        return x
    parts = torch.stack(x.chunk(n, dim=split))
    received = _wait(functional.all_to_all_single(parts, None, None, group))
    return torch.cat(received.view(parts.shape).unbind(0), dim=joined)


def all_to_all_rows(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first send[0] rows to rank 0, the next send[1] to rank 1, ...; receive[i] come from rank i. No gradients."""
    if group.size() == 1:
        return x
    return _wait(functional.all_to_all_single(x.contiguous(), receive, send, group))


def part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along `dim`."""
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous() if group.size() > 1 else x


def _leads(x: Tensor, dim: int) -> bool:
    return all(size == 1 for size in x.shape[:dim])


def _wait(x: Tensor) -> Tensor:
    """A plain tensor: eager functional collectives return one that waits when it is used, with its own dispatch."""
    return functional.wait_tensor(x) if isinstance(x, functional.AsyncCollectiveTensor) else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


class _GatherEqual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return part(gradients[0], ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return all_gather(gradients[0], ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return all_gather(gradients[0], ctx.dim, ctx.group), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return all_reduce(gradients[0], ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, joined: int, group: dist.ProcessGroup) -> Tensor:
        ctx.split, ctx.joined, ctx.group = split, joined, group
        return all_to_all(x, split, joined, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return all_to_all(gradients[0], ctx.joined, ctx.split, ctx.group), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return all_to_all_rows(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return all_to_all_rows(gradients[0], ctx.receive, ctx.send, ctx.group), None, None, None


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim`. What ranks then do differs: their gradients are summed, and cut again."""
    return _Gather.apply(x, dim, group)


def gather_equal(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim`. All ranks then do the same: each keeps its part of the one gradient."""
    return _GatherEqual.apply(x, dim, group)


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over ranks; gradients of the parts are gathered."""
    return _Scatter.apply(x, dim, group)


def split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of what is equal on all ranks; gradients of the parts are gathered."""
    return _Split.apply(x, dim, group)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, with which all then do the same; the gradient passes through."""
    return _Sum.apply(x, group)


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` itself, equal on all ranks, which then do different things with it: gradients are summed over ranks."""
    return _SumGradient.apply(x, group)


def exchange(x: Tensor, split: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: cut along dim `split`, part i goes to rank i, join along `joined`; gradients go the way back."""
    return _Exchange.apply(x, split, joined, group)


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of uneven parts: send[i] rows, one part after the other, go to rank i, and receive[i] come from it.

    Every rank takes part, also one with no row to send or receive; gradients go the way back.
    """
    return _ExchangeRows.apply(x, send, receive, group)
