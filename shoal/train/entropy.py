"""Cross-entropy by two kernels of Shoal's own on GPUs, which read logits as fast as memory gives them.

What torch compiles for the same loss reads them at a third of that in forward. For 8,192 tokens and a vocabulary of 128,256 in
bf16 (an H200, benchmarks/results/kernels_1xh200.json) it takes 2.7 ms in all, these kernels 1.7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.parallel.sums import has_triton
from shoal.simulated import is_simulated

KINDS = (torch.bfloat16, torch.float16, torch.float32)


def takes(logits: Tensor) -> bool:
    """Whether the kernels are for these logits."""
    return logits.is_cuda and logits.dtype in KINDS and not is_simulated() and has_triton()


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore: int = -100) -> Tensor:
    """Sum of cross-entropies of logits (N, V) on a GPU and integer labels (N,), in fp32.

    A label outside of the vocabulary gives NaN, as loss and as its row's gradient. The gradient has no gradient.

    Raises:
        ValueError: there are not as many labels as rows of logits.
        TypeError: labels are not integers.
    """
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"{labels.numel():,} labels for {len(logits):,} rows of logits: expected one for each token that the model was given"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels are {labels.dtype}: expected int64, numbers of words")
    return _CrossEntropySum.apply(logits, labels, ignore)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
        from shoal.train.entropy_kernel import launch_losses

        if logits.stride(1) != 1:  # rows may be apart, as where a padded vocabulary was cut
            logits = logits.contiguous()
        labels = labels.contiguous()
        losses, lse = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
        launch_losses(logits, labels, losses, lse, ignore)
        ctx.save_for_backward(logits, labels, lse)
        ctx.ignore = ignore
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, None, None]:
        from shoal.train.entropy_kernel import launch_gradients

        logits, labels, lse = ctx.saved_tensors
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        launch_gradients(logits, labels, lse, grad_outputs[0].float(), found, ctx.ignore)
        return found, None, None
