"""Gradients of 16 bits are exchanged as they are: each rank gets its part from all others and adds them up in fp32.

These are the sums of `fully_shard`, which copies gradients into one buffer in fp32 and reduces that: here are no copies, and half
of the bytes. Gradients in the type of their sums are reduced and scattered from where they lie. Those of ranks on several hosts,
between which a ring sends less than an exchange, stay with `fully_shard` if they have 16 bits.

Sources: torch's FSDP2 (`foreach_reduce`, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); Megatron-Core's
`reduce_scatter_with_fp32_accumulation`, which exchanges gradients in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from shoal.parallel.peers import Peers
from shoal.parallel.sums import blocks_of, sum_parts


class Elsewhere(Tensor):
    """Stands for a buffer of `fully_shard` without having its memory: what would be copied into it is noted in `parts`."""

    parts: list[Tensor]
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]

    @staticmethod
    def __new__(
        cls: type[Elsewhere],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        parts: list[Tensor],
    ) -> Elsewhere:
        make: Any = torch.Tensor._make_wrapper_subclass  # torch's way to make a tensor of such a class
        made = make(cls, tuple(shape), dtype=dtype, device=device)
        made.parts = parts
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Tells recorders of memory that this has none of its own."""
        return [], None

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.view.default:
            return _view(*args)
        if func is torch.ops.fsdp.chunk_cat.default:
            tensors, _dim, _count, *out = args
            (out[0] if out else kwargs["out"]).parts.extend(tensors)
            return None
        raise NotImplementedError(
            f"torch {torch.__version__} does {func} to a buffer of fully_shard, which shoal does not know; use an older torch"
        )


def _view(whole: Elsewhere, shape: Sequence[int]) -> Elsewhere:
    count, known = whole.numel(), math.prod(size for size in shape if size != -1)
    sizes = [count // known if size == -1 else size for size in shape]
    return Elsewhere(sizes, whole.dtype, whole.device, whole.parts)


class Exchange:
    """In place of a unit's reduce-scatter; `fully_shard` asks for its input, copies gradients into it, and asks for its output.

    Args:
        ranks: over which parameters are cut.
        parameters: gives those whose gradients it sends.
        peers: into whose memory gradients of 16 bits are written, where that can be.
    """

    def __init__(
        self, ranks: int, parameters: Callable[[], Sequence[nn.Parameter]], peers: Peers | None = None
    ) -> None:
        self._ranks, self.parameters, self._peers = ranks, parameters, peers
        self.wants_squares = False
        """somebody takes them: see `take_squares`"""
        self._squares: list[Tensor | None] = []
        self._asked = 0  # elements of an input whose output has not been asked for

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (count,) = size
        if self._asked == count * self._ranks:
            self._asked = 0
            return torch.empty(count, dtype=dtype, device=device)
        self._asked = count
        return Elsewhere((count,), dtype, device, [])

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if not isinstance(input_tensor, Elsewhere) or op != dist.ReduceOp.SUM:
            raise NotImplementedError(
                f"torch {torch.__version__} reduces gradients in a way that shoal does not know: {op}"
            )
        whole = [_even(gradient, self._ranks) for gradient in input_tensor.parts]
        parts = output_tensor.split([gradient.numel() // self._ranks for gradient in whole])
        if whole[0].dtype == output_tensor.dtype:
            _scatter_many(parts, whole, group)
            squares = None
        elif self._peers is not None:
            squares = self._peers.sum_parts(parts, whole)
        else:
            squares = _exchange(parts, whole, group)
        if self.wants_squares:
            self._squares.append(squares)

    def take_squares(self) -> Tensor | None:
        """The sum of squares of what was received since the last time, if that was one exchange, and found on the way."""
        found, self._squares = self._squares, []
        return found[0] if len(found) == 1 else None


def _even(gradient: Tensor, ranks: int) -> Tensor:
    """Its elements, with zeros behind the last row as far as all ranks have equally many rows."""
    rows = gradient.shape[0]
    if rows % ranks == 0:
        return gradient.reshape(-1)
    padded = gradient.new_zeros((-(-rows // ranks) * ranks, *gradient.shape[1:]))
    padded[:rows] = gradient
    return padded.view(-1)


def _exchange(parts: Sequence[Tensor], gradients: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Each of `parts` becomes the sum of all ranks' gradients there; returns the sum of their squares."""
    ranks, rank = group.size(), group.rank()
    rest = [
        gradient.new_empty((ranks - 1) * part.numel())
        for part, gradient in zip(parts, gradients, strict=True)
    ]
    exchange_many(rest, gradients, group)
    counts = [blocks_of(part.numel()) for part in parts]
    squares = torch.empty(sum(counts), dtype=torch.float32, device=parts[0].device)
    for part, others, gradient, own in zip(parts, rest, gradients, squares.split(counts), strict=True):
        sum_parts(gradient.narrow(0, rank * part.numel(), part.numel()), others, part, own)
    return squares.sum()


def gather_many(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Each output becomes all ranks' inputs, by one launch. Collective.

    torch.distributed has functions for one tensor; for many there are these methods of a group (2.13 gave them new names), called
    as its own `_coalescing_manager` does it in each version.
    """
    methods: Any = group
    if hasattr(methods, "all_gather_single_coalesced"):
        options = distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        _wait(methods.all_gather_single_coalesced(outputs, inputs, options))
    else:
        _wait(methods.allgather_into_tensor_coalesced(outputs, inputs))


def _scatter_many(outputs: Sequence[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> None:
    """Each output becomes this rank's part of the sum of all ranks' inputs, by one launch."""
    options = distributed_c10d.ReduceScatterOptions()
    options.asyncOp = False
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    methods: Any = group
    call = (
        getattr(methods, "reduce_scatter_single_coalesced", None) or methods.reduce_scatter_tensor_coalesced
    )
    _wait(call(list(outputs), inputs, options))


def exchange_many(received: Sequence[Tensor], whole: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each of `received` becomes the other ranks' parts for this one, in their order. Collective."""
    exchange = _exchange_singly if received[0].device.type == "cpu" else _exchange_at_once
    exchange(received, whole, group)


def _exchange_singly(received: Sequence[Tensor], whole: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """By what Gloo has."""
    for others, gradient in zip(received, whole, strict=True):
        every = torch.empty_like(gradient)
        dist.all_to_all_single(every, gradient, group=group)
        own = gradient.numel() // group.size()
        before, _, after = every.split((group.rank() * own, own, others.numel() - group.rank() * own))
        others.copy_(torch.cat((before, after)))


def _exchange_at_once(received: Sequence[Tensor], whole: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """By one launch of all, in which no rank sends itself anything."""
    ranks, rank = group.size(), group.rank()
    nothing = received[0].new_empty(0)
    options = distributed_c10d.AllToAllOptions()
    options.asyncOp = False
    # one launch of many exchanges has no public name (pytorch/pytorch#100949)
    with distributed_c10d._coalescing_manager(group, received[0].device):
        for others, gradient in zip(received, whole, strict=True):
            sources, targets = list(gradient.chunk(ranks)), list(others.chunk(ranks - 1))
            sources[rank] = nothing
            _wait(group.alltoall([*targets[:rank], nothing, *targets[rank:]], sources, options))


def _wait(work: Any) -> None:
    """As torch's functions that are not asynchronous: the current stream waits, not the host."""
    if work is not None:
        work.wait()
