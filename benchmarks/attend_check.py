"""Are the block-wise attention operators of this device those of `scaled_dot_product_attention`? Prints the largest errors.

python benchmarks/attend_check.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from shoal.parallel.attend import Attended, attend, attend_backward, merge


def main() -> int:
    """Compare; 1 if an error is larger than rounding."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bad = 0
    for dtype, bound in ((torch.bfloat16, 3e-2), (torch.float32, 1e-4)):
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(1, heads, 256, 64, device=device, dtype=dtype) for heads in (8, 2, 2)
        )
        for tensor in (query, key, value):
            tensor.requires_grad_(True)
        whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        gradient = torch.randn_like(whole)
        truth = torch.autograd.grad(whole, (query, key, value), gradient)
        with torch.no_grad():
            found = _in_two_blocks(query, key, value, gradient)
        for name, mine, right in zip(("out", "dq", "dk", "dv"), found, (whole, *truth), strict=True):
            error = ((mine - right).norm() / right.norm()).item()
            bad += error > bound
            print(f"{device} {dtype} {name}: {error:.1e}")
    return int(bad > 0)


def _in_two_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Causal attention with the second half of the queries looking at the first half of the keys by a block of its own."""
    half = query.shape[2] // 2
    halves = [
        (x[:, :, :half].contiguous(), x[:, :, half:].contiguous()) for x in (query, key, value, gradient)
    ]
    (q1, q2), (k1, k2), (v1, v2), (g1, g2) = halves
    first, own = attend(q1, k1, v1, causal=True), attend(q2, k2, v2, causal=True)
    second = merge(Attended(own.out.float(), own.lse.float()), attend(q2, k1, v1, causal=False))
    second = Attended(second.out.to(query.dtype), second.lse, own.state)
    a = attend_backward(g1, q1, k1, v1, first, causal=True)
    b = attend_backward(g2, q2, k2, v2, second, causal=True)
    c = attend_backward(g2, q2, k1, v1, second, causal=False)
    out = torch.cat((first.out, second.out), 2)
    return (
        out,
        torch.cat((a[0], b[0] + c[0]), 2),
        torch.cat((a[1] + c[1], b[1]), 2),
        torch.cat((a[2] + c[2], b[2]), 2),
    )


if __name__ == "__main__":
    sys.exit(main())
