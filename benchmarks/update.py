"""AdamW's update alone on a GPU: torch's fused one beside Shoal's, by the device's clock and the host's.

    python benchmarks/update.py --out FILE [--repeat 20]

Tensors are those of 8 layers of an 8B Llama, and of a 433M one. Bytes are the fewest that an update can move: 28 an element
(parameter, gradient and two moments are read, all but the gradient are written), and 2 of weights that are also written in bf16.
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
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.job import Optimizer
from shoal.observe.machine import facts
from shoal.parallel.places import Ready
from shoal.run import write_whole
from shoal.train.adamw import Tables, takes
from shoal.train.fused import make, update

BYTES = 28
NARROW = 2  # bytes more, of weights in 16 bits
MODELS = {
    "8 layers of 8B": [(128_256, 4096)] * 2
    + [*[(14_336, 4096)] * 3, *[(4096, 4096)] * 2, *[(1024, 4096)] * 2, *[(4096,)] * 2] * 8,
    "433M": [(128_256, 1024)] * 2 + [*[(2816, 1024)] * 3, *[(1024, 1024)] * 4, *[(1024,)] * 2] * 12,
}


def main() -> int:
    """Measure both on both models; 1 if the kernel does not take them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    rows = [row for name in MODELS for row in measure(name, options.repeat)]
    command = f"python benchmarks/update.py {shlex.join(sys.argv[1:])}"
    write_whole(
        options.out, json.dumps({"command": command, "machine": facts(), "rows": rows}, indent=1) + "\n"
    )
    for row in rows:
        print(row)
    return int(any(not row["taken"] for row in rows))


def measure(name: str, repeat: int) -> list[dict[str, Any]]:
    """torch's update, and ours, of the same tensors."""
    parts = {
        str(number): nn.Parameter(torch.randn(shape, device="cuda"))
        for number, shape in enumerate(MODELS[name])
    }
    for part in parts.values():
        part.grad = torch.randn_like(part)
    elements = sum(part.numel() for part in parts.values())
    optimizer = make(Optimizer(name="adamw", schedule="constant"), parts, parts)
    divide_by, skip = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    places: dict[Tensor, Tensor] = {
        part: torch.empty(part.numel(), dtype=torch.bfloat16, device="cuda") for part in parts.values()
    }
    rows = []
    for who, tables, into in (
        ("torch", None, {}),
        ("shoal", Tables(), {}),
        ("shoal, weights in bf16 too", Tables(), places),
        ("torch, weights in bf16 after it", None, places),
    ):
        device_ms, host_ms = timed(
            lambda tables=tables, into=into: update(
                optimizer, 1e-4, divide_by, skip, tables, Ready(into, {})
            ),
            repeat,
        )
        rows.append(
            {
                "model": name,
                "elements": elements,
                "update": who,
                "taken": takes(optimizer),
                "ms": round(device_ms, 3),
                "host_ms": round(host_ms, 3),
                "tb_per_s": round(elements * (BYTES + NARROW * bool(into)) / device_ms / 1e9, 2),
            }
        )
    return rows


def timed(work: Callable[[], None], repeat: int) -> tuple[float, float]:
    """Milliseconds of the device and of the host, each the mean of `repeat` calls after three others."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    first.record()
    for _ in range(repeat):
        work()
    last.record()
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    return first.elapsed_time(last) / repeat, host_s / repeat * 1000


if __name__ == "__main__":
    sys.exit(main())
