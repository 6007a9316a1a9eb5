"""The context axis: ranks share each sequence. Every token is computed once; attention brings queries and keys together.

`ring`: keys and values go round, and each rank merges what its queries find in them (Liu et al. 2023, arXiv:2310.01889). The
sequence is cut into 2 n chunks and rank i has chunks i and 2 n - 1 - i, so that causal attention costs all ranks the same.
`all_to_all`: before attention the ranks trade their parts of the sequence for parts of the heads, and back after it ("Ulysses",
Jacobs et al. 2023, arXiv:2309.14509).

With masks of documents keys and values are gathered, and torch's attention takes the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.layout import Layout
from shoal.parallel.attend import Attended, attend, attend_backward, merge
from shoal.parallel.collectives import exchange, gather
from shoal.parallel.layout import modules_named
from shoal.plan import Plan

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""From queries (B, H, T, E), keys and values (B, K, T, E), and a mask or None (causal), to (B, H, T, E)."""


class Sequence:
    """Which tokens of a sequence this rank has, and how to put all of them in order again."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        self.group, self.parts = group, group.size()
        self.balanced = plan.context_by == "ring"

    def index(self, length: int, rank: int | None = None) -> Tensor:
        """Places in the sequence of a rank's tokens, in its order.

        Raises:
            ValueError: the sequence cannot be cut evenly.
        """
        rank = self.group.rank() if rank is None else rank
        pieces = 2 * self.parts if self.balanced else self.parts
        if length % pieces:
            raise ValueError(
                f"a sequence of {length} tokens cannot be cut into {pieces} pieces for plan.context = {self.parts}; "
                f"give sequences whose length is a multiple of {pieces}"
            )
        if not self.balanced:
            return torch.arange(length).chunk(self.parts)[rank]
        chunks = torch.arange(length).chunk(2 * self.parts)
        return torch.cat((chunks[rank], chunks[2 * self.parts - 1 - rank]))

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor."""
        return x.index_select(dim, self.index(x.shape[dim]).to(x.device))

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks in the sequence's order; gradients of all ranks are summed."""
        gathered = gather(x, dim, self.group)
        places = torch.cat([self.index(gathered.shape[dim], rank) for rank in range(self.parts)])
        return gathered.index_select(dim, places.argsort().to(x.device))


def apply_context(model: nn.Module, plan: Plan, group: dist.ProcessGroup, layout: Layout) -> Sequence:
    """Make a model's attention look at the whole sequence while it is given a part; in place.

    Raises:
        ValueError: the layout names no attention, or modules without an `attend`.
    """
    sequence = Sequence(plan, group)
    for path, module in modules_named(model, layout.attention).items():
        if not callable(getattr(module, "attend", None)):
            raise ValueError(f"layout: attention = {path!r} has no function `attend` to be replaced")
        module.attend = _attend_over(sequence, plan)  # pyrefly: ignore[bad-argument-type]
    return sequence


def cut_batch(data: Any, sequence: Sequence, layout: Layout) -> Any:
    """A batch whose sequences are this rank's parts, with the places of their tokens.

    Raises:
        TypeError: the batch is no dict, or has none of the entries that the layout names.
    """
    if not isinstance(data, dict) or not set(layout.inputs) & set(data):
        raise TypeError(
            f"context parallelism cuts the batch's entries {sorted(layout.inputs)} (the model's layout), and the dataset gives "
            f"{sorted(data) if isinstance(data, dict) else type(data).__name__}"
        )
    parts = {
        name: sequence.cut(x, layout.inputs[name]) if name in layout.inputs else x for name, x in data.items()
    }
    if layout.positions is not None and layout.positions not in data:
        name = next(name for name in layout.inputs if name in data)
        index = sequence.index(data[name].shape[layout.inputs[name]])
        parts[layout.positions] = index.to(data[name].device)
    return parts


def _attend_over(sequence: Sequence, plan: Plan) -> Attend:
    causal = _ring(sequence.group) if plan.context_by == "ring" else _all_to_all(sequence.group)

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return causal(query, key, value)
        # (B, 1, T, T) of the whole sequence: the rows of this rank's queries
        rows = sequence.cut(mask, 2)
        key, value = sequence.whole(key, 2), sequence.whole(value, 2)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=rows, enable_gqa=True)

    return run


def _all_to_all(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ranks = group.size()
        if key.shape[1] % ranks:  # fewer key/value heads than ranks: each goes to all that need it
            times = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        query, key, value = (exchange(x, 1, 2, group) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return exchange(mixed, 2, 1, group)

    return run


def _ring(group: dist.ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    @torch.compiler.disable  # a compiled block would trace the operators below attention without their gradients
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return RingAttention.apply(query, key, value, group)

    return run


class RingAttention(torch.autograd.Function):
    """Causal attention over a sequence that is cut as `Sequence` cuts it when it is balanced."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, half = group.rank(), query.shape[2] // 2
        first = attend(query, key, value, causal=True)
        found = Attended(first.out.to(_wide(query)), first.lse.to(_wide(query)))
        moving = _Moving(group, torch.stack((key, value)))
        for step in range(1, group.size()):
            key_, value_ = moving.arrived()
            if step < group.size() - 1:
                moving.send_on()
            if (rank - step) % group.size() < rank:  # its first chunk is before all of ours, its second after
                found = merge(found, attend(query, key_[:, :, :half], value_[:, :, :half], causal=False))
            else:  # all of it is before our second chunk, and after our first
                later = merge(
                    Attended(found.out[:, :, half:], found.lse[:, :, half:]),
                    attend(query[:, :, half:], key_, value_, causal=False),
                )
                found = Attended(
                    torch.cat((found.out[:, :, :half], later.out), 2),
                    torch.cat((found.lse[:, :, :half], later.lse), 2),
                )
        out = found.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, found.lse)
        ctx.group, ctx.state = group, first.state
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        group, half, gradient = ctx.group, query.shape[2] // 2, gradients[0].contiguous()
        rank, whole = group.rank(), Attended(out, lse, ctx.state)
        later = Attended(out[:, :, half:].contiguous(), lse[:, :, half:].contiguous(), ctx.state)
        dq, dk, dv = (
            x.to(_wide(query)) for x in attend_backward(gradient, query, key, value, whole, causal=True)
        )
        moving, sums = _Moving(group, torch.stack((key, value))), _Moving(group, torch.stack((dk, dv)))
        for step in range(1, group.size()):
            key_, value_ = moving.arrived()
            if step < group.size() - 1:
                moving.send_on()
            if (rank - step) % group.size() < rank:
                parts = attend_backward(
                    gradient, query, key_[:, :, :half], value_[:, :, :half], whole, causal=False
                )
                dq += parts[0]
                added = torch.zeros_like(sums.held)
                added[:, :, :, :half] = torch.stack(parts[1:])
            else:
                parts = attend_backward(
                    gradient[:, :, half:].contiguous(), query[:, :, half:], key_, value_, later, causal=False
                )
                dq[:, :, half:] += parts[0]
                added = torch.stack(parts[1:]).to(sums.held.dtype)
            sums.arrived().add_(added)  # what the ranks before this one have found, and now this one
            sums.send_on()
        dk, dv = sums.arrived()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Moving:
    """A tensor that goes round: sent to the next rank while one computes, received from the one before."""

    def __init__(self, group: dist.ProcessGroup, held: Tensor) -> None:
        self.group, self.held = group, held
        ranks = dist.get_process_group_ranks(group)
        self._to = ranks[(group.rank() + 1) % group.size()]
        self._from = ranks[(group.rank() - 1) % group.size()]
        self._coming: Tensor | None = None
        self._work: list[dist.Work] = []
        if group.size() > 1:
            self.send_on()

    def send_on(self) -> None:
        """Begin to send what is held, and to receive what comes."""
        self._coming = torch.empty_like(self.held)
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.held, self._to, self.group),
                dist.P2POp(dist.irecv, self._coming, self._from, self.group),
            ]
        )

    def arrived(self) -> Tensor:
        """What came, once it has come."""
        for work in self._work:
            work.wait()
        if self._coming is not None:
            self.held, self._coming, self._work = self._coming, None, []
        return self.held
