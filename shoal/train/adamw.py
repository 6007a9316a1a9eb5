"""AdamW's update on NVIDIA GPUs, of all parts in one launch, by a kernel of ours.

torch's own fused one writes gradients back, which nobody reads again, and takes 26.1 ms for 2.8 billion elements on an H200;
this one takes 19.1, at 4.1 TB/s (`benchmarks/update.py`). The state is that of `torch.optim.AdamW`, in place. What this cannot
take is left to torch. Results differ by roundings: the learning rate is read in fp32, and a bias correction is a factor.

Source: Loshchilov and Hutter 2019 (decoupled weight decay, arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.parallel.places import Ready
from shoal.parallel.sums import has_triton
from shoal.simulated import is_simulated

BLOCK = 1024  # elements that one program updates: of 2,048 it takes 22.3 ms, of 4,096 25.0
ALIGNED = 16  # bytes, of addresses that are read 4 elements at a time


class Blocks(NamedTuple):
    """Which elements each program of a launch updates."""

    sizes: Tensor
    """(parts,): elements"""
    owners: Tensor
    """(programs,): the part of each"""
    begins: Tensor
    """(parts,): the first program of each"""


class Table(NamedTuple):
    """Where the tensors of one group of parameters lie, for a kernel."""

    addresses: Tensor
    """(parts, 7) on the device: of parameter, gradient, both moments, number of the update, its place, its largest; or 0"""
    blocks: Blocks
    aligned: bool
    kind: torch.dtype | None
    """of places, if there are any"""
    finds: bool
    """the largest elements of some"""


class Tables:
    """Tables of the groups of an optimizer; what has not changed since the last update is not made anew."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[list[int], Blocks]] = {}
        self._tables: dict[int, tuple[list[int], Table]] = {}

    def of(
        self,
        number: int,
        rows: Sequence[tuple[Tensor, ...]],
        places: Sequence[Tensor | None] = (),
        largest: Sequence[Tensor | None] = (),
    ) -> Table:
        """The table of group `number`: of each part the parameter, its gradient, both moments and the number of the update.

        Args:
            places, largest: of each part as in `Ready`, if it has one.
        """
        device, sizes = rows[0][0].device, [row[0].numel() for row in rows]
        none = [None] * len(rows)
        there, found = places or none, largest or none
        addresses = [
            0 if tensor is None else tensor.data_ptr()
            for row, place, one in zip(rows, there, found, strict=True)
            for tensor in (*row, place, one)
        ]
        blocks = self._blocks.get(number)
        if blocks is None or blocks[0] != sizes:
            blocks = self._blocks[number] = sizes, blocks_of(sizes, BLOCK, device)
            self._tables.pop(number, None)
        table = self._tables.get(number)
        if table is None or table[0] != addresses:
            aligned = not any(
                address % ALIGNED for at, address in enumerate(addresses) if at % 7 not in (4, 6)
            )
            where = _on_device(addresses, device).view(-1, 7)
            kind = next((place.dtype for place in there if place is not None), None)
            finds = any(one is not None for one in found)
            table = self._tables[number] = addresses, Table(where, blocks[1], aligned, kind, finds)
        return table[1]


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Without waiting for a GPU."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def blocks_of(sizes: Sequence[int], block: int, device: torch.device) -> Blocks:
    """Blocks of `block` elements, or of what is left of a part.

    Example:
        >>> found = blocks_of([5, 0, 2], 4, torch.device("cpu"))
        >>> found.owners.tolist(), found.begins.tolist()
        ([0, 0, 2], [0, 2, 2])
    """
    whole = torch.tensor(sizes, device=device)
    counts = (whole + block - 1) // block
    numbers = torch.arange(len(sizes), dtype=torch.int32, device=device)
    return Blocks(whole, torch.repeat_interleave(numbers, counts), counts.cumsum(0) - counts)


def takes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the kernel updates what this optimizer holds: fp32 tensors without gaps on NVIDIA GPUs, where triton is there."""
    if not isinstance(optimizer, torch.optim.AdamW) or is_simulated():
        return False
    parts = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    tensors = [tensor for part in parts for tensor in (part, part.grad) if tensor is not None]
    return (
        bool(tensors)
        and all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and has_triton()
    )


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    tables: Tables,
    divide_by: Tensor,
    skip: Tensor,
    ready: Ready[Tensor] | None = None,
) -> None:
    """Update all parts that have a gradient, or nothing where `skip` is 1; no wait for the device.

    Args:
        divide_by: what gradients are to be divided by. skip: one element, 0 or 1; both fp32.
        ready: what is left of parts beside.
    """
    from shoal.train.adamw_kernel import launch

    for number, group in enumerate(optimizer.param_groups):
        parts = [part for part in group["params"] if part.grad is not None]
        if not parts:
            continue
        states = [_state_of(optimizer, part) for part in parts]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_sub_(steps, [skip] * len(steps))
        rows = [
            (part, part.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for part, state in zip(parts, states, strict=True)
        ]
        there = [ready.places.get(part) for part in parts] if ready else []
        found = [ready.largest.get(part) for part in parts] if ready else []
        if any(one is not None for one in found):
            torch._foreach_zero_([one for one in found if one is not None])
        launch(tables.of(number, rows, there, found), group, divide_by, skip, BLOCK)


def _state_of(optimizer: torch.optim.Optimizer, part: Tensor) -> dict[str, Any]:
    """As torch's AdamW makes it before its first update."""
    state = optimizer.state[part]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(part), torch.zeros_like(part)
    return state
