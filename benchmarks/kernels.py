"""Attention and the loss alone on a GPU that is hot: what runs by default beside what else there is, taking turns.

    python benchmarks/kernels.py --out FILE [--hot-s 2] [--turns 2]

Attention is causal, 32 heads on 8, in bf16: cuDNN's, and flash-attention 4's where it is installed; forward, backward, and both
between the matrix products of a block of its model, forward and backward, as steps have it (a GPU at its power limit runs
products slower after a kernel that takes more). The loss is the cross-entropy of 8,192 tokens over 128,256 words: Shoal's
kernels, and what torch compiles. Each figure is the mean of the second half of so many seconds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.observe.machine import facts
from shoal.parallel import flash
from shoal.run import write_whole
from shoal.train.kernels import attention_kernels
from shoal.train.objective import NextToken

HEADS, KV_HEADS, VOCABULARY = 32, 8, 128_256
SHAPES = {"8B": (1, 8192, 128, 14_336), "1.24B": (4, 2048, 64, 8192)}
"""samples, tokens, width of a head, width of the feed-forward"""


def main() -> int:
    """Measure all; 1 if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hot-s", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py needs a GPU", file=sys.stderr)
        return 1
    rows = []
    for turn in range(options.turns):
        for make in (attention_rows, loss_rows):
            for row in make(options.hot_s):
                rows.append({"turn": turn, **row})
                print(rows[-1], flush=True)
    command = f"python benchmarks/kernels.py {shlex.join(sys.argv[1:])}"
    write_whole(
        options.out, json.dumps({"command": command, "machine": facts(), "rows": rows}, indent=1) + "\n"
    )
    return 0


def attention_rows(hot_s: float) -> list[dict[str, Any]]:
    """Each kernel there is, on both shapes."""
    kernels = ("cudnn", "flash4") if flash.is_installed() else ("cudnn",)
    rows = []
    for name, (samples, length, width, wide) in SHAPES.items():
        query, key, value = (
            torch.randn(samples, length, heads, width, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        products = block_products(samples * length, HEADS * width, KV_HEADS * width, wide)
        for kernel in kernels:
            with attention_kernels(torch.device("cuda"), kernel):
                row = {
                    "what": "attention",
                    "model": name,
                    "kernel": kernel,
                    **attention_ms(query, key, value, products, hot_s),
                }
            rows.append(row)
    return rows


def attention_ms(
    query: Tensor, key: Tensor, value: Tensor, products: Callable[[], None], hot_s: float
) -> dict[str, float]:
    """Forward, backward, and both between products."""

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    out = forward()
    gradient = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    def block() -> None:
        products()
        forward()
        backward()

    found = {"forward": forward, "backward": backward, "block": block}
    return {f"{name}_ms": hot_ms(work, hot_s) for name, work in found.items()}


def block_products(tokens: int, dim: int, kv_dim: int, wide: int) -> Callable[[], None]:
    """The products of a block's linears, forward and backward."""
    sizes = ((dim, dim), (kv_dim, dim), (kv_dim, dim), (dim, dim), (wide, dim), (wide, dim), (dim, wide))

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02

    given = [(made(tokens, inner), made(outer, inner), made(tokens, outer)) for outer, inner in sizes]

    def run() -> None:
        for x, weight, gradient in given:
            x @ weight.t()
            gradient @ weight
            gradient.t() @ x

    return run


def loss_rows(hot_s: float) -> list[dict[str, Any]]:
    """Shoal's kernels, and what torch compiles."""
    logits = torch.randn(1, 8192, VOCABULARY, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (1, 8192), device="cuda")
    objective = NextToken(compiled=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "shoal": lambda: objective.loss(logits, {"labels": labels}).sum,
        "compiled": lambda: objective._sum(logits, labels),
    }
    rows = []
    for name, call in calls.items():
        total = call()

        def backward(total: Tensor = total) -> None:
            torch.autograd.grad(total, logits, retain_graph=True)

        rows.append(
            {
                "what": "loss",
                "kernel": name,
                "loss": total.item(),
                "forward_ms": hot_ms(call, hot_s / 2),
                "backward_ms": hot_ms(backward, hot_s / 2),
            }
        )
    return rows


def hot_ms(work: Callable[[], Any], seconds: float, together: int = 5) -> float:
    """Milliseconds of one call, of calls that follow each other for so many seconds."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began, found = time.perf_counter(), []
    while not found or time.perf_counter() - began < seconds:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(together):
            work()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / together)
    late = found[len(found) // 2 :]
    return round(sum(late) / len(late), 4)


if __name__ == "__main__":
    sys.exit(main())
