"""Which attention kernels may run, best first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# H100, forward + backward: cuDNN 517 TFLOP/s, flash 285 (torch 2.11, cuDNN 9.19)
_BEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@contextmanager
def attention_kernels(device: torch.device) -> Iterator[None]:
    """Prefer the fastest attention kernel that takes the inputs."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(_BEST_FIRST, set_priority=True):
        yield
