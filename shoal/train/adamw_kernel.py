"""The kernel of `adamw`: imported where a GPU runs it, since only there triton is sure to be."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor
from triton.language.extra.cuda.libdevice import sub_rn  # pyrefly: ignore[missing-import]

KINDS = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""of places, as triton has them"""


def launch(table: Any, group: dict[str, Any], divide_by: Tensor, skip: Tensor, block: int) -> None:
    """Update the parts of a table.

    Args:
        group: of a `torch.optim.AdamW`.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    blocks = table.blocks
    _adamw[(len(blocks.owners),)](
        table.addresses,
        blocks.sizes,
        blocks.owners,
        blocks.begins,
        divide_by,
        skip,
        lr,
        lr * group["weight_decay"],
        group["eps"],
        beta1=beta1,
        beta2=beta2,
        log1=math.log(beta1) if beta1 else -1e9,
        log2=math.log(beta2) if beta2 else -1e9,
        aligned=table.aligned,
        kind=KINDS[table.kind],
        finds=table.finds,
        block=block,
        num_warps=8,
    )


@triton.jit
def _adamw(  # noqa: ANN202
    addresses,  # noqa: ANN001 - triton's own types
    sizes,  # noqa: ANN001
    owners,  # noqa: ANN001
    begins,  # noqa: ANN001
    divide_by,  # noqa: ANN001
    skip,  # noqa: ANN001
    lr,  # noqa: ANN001
    decay,  # noqa: ANN001
    eps,  # noqa: ANN001
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    log1: tl.constexpr,
    log2: tl.constexpr,
    aligned: tl.constexpr,
    kind: tl.constexpr,
    finds: tl.constexpr,
    block: tl.constexpr,
):
    number = tl.program_id(0)
    owner = tl.load(owners + number)
    at = (number - tl.load(begins + owner)) * block + tl.arange(0, block)  # int64, as `begins` is
    there = at < tl.load(sizes + owner)
    inside = there & (tl.load(skip) == 0.0)
    row = addresses + owner * 7
    whole: tl.constexpr = tl.pointer_type(tl.float32)
    parameters, gradients = tl.load(row).to(whole), tl.load(row + 1).to(whole)
    firsts_of, seconds_of = tl.load(row + 2).to(whole), tl.load(row + 3).to(whole)
    if aligned:
        parameters, gradients = tl.multiple_of(parameters, 16), tl.multiple_of(gradients, 16)
        firsts_of, seconds_of = tl.multiple_of(firsts_of, 16), tl.multiple_of(seconds_of, 16)
    # in fp64: 1 - 0.999 has 3 digits less than 0.999
    count = tl.load(tl.load(row + 4).to(whole)).to(tl.float64)  # of this update, from 1 on
    rate = (lr / (1.0 - tl.exp(count * log1))).to(tl.float32)
    root = (1.0 / tl.sqrt(1.0 - tl.exp(count * log2))).to(tl.float32)
    gradient = tl.load(gradients + at, mask=inside, other=0.0) / tl.load(divide_by)
    first = tl.load(firsts_of + at, mask=inside, other=0.0)
    second = tl.load(seconds_of + at, mask=inside, other=0.0)
    before = tl.load(parameters + at, mask=there, other=0.0)
    first = beta1 * first + (1.0 - beta1) * gradient
    second = beta2 * second + (1.0 - beta2) * gradient * gradient
    parameter = before - decay * before
    # rounded as it is said: ptxas would join the division and the subtraction, or not, by what else a kernel does
    parameter = sub_rn(parameter, rate * first / (tl.sqrt(second) * root + eps))
    tl.store(firsts_of + at, first, mask=inside)
    tl.store(seconds_of + at, second, mask=inside)
    tl.store(parameters + at, parameter, mask=inside)
    if finds:
        slot = tl.load(row + 6)
        if slot != 0:  # magnitudes are ordered as their bits are as integers; not a number is the largest
            bits = tl.where(inside, parameter, before).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            tl.atomic_max(slot.to(tl.pointer_type(tl.int32)), tl.max(bits), sem="relaxed")
    if kind is not None:
        address = tl.load(row + 5)
        places = address.to(tl.pointer_type(kind))
        if aligned:
            places = tl.multiple_of(places, 16)
        tl.store(places + at, parameter.to(kind), mask=inside & (address != 0))
