"""Which attention kernels may run, best first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.parallel import flash
from shoal.plan import AttentionKernel
from shoal.simulated import is_simulated

# H100, forward + backward: cuDNN 517 TFLOP/s, torch's own flash kernel 285 (torch 2.11, cuDNN 9.19)
_BEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_FLASH_FIRST = [
    SDPBackend.FLASH_ATTENTION,
    *(kind for kind in _BEST_FIRST if kind != SDPBackend.FLASH_ATTENTION),
]


@contextmanager
def attention_kernels(device: torch.device, kernel: AttentionKernel | None = None) -> Iterator[None]:
    """Prefer the fastest attention kernel that takes the inputs, or the one that is said.

    Raises:
        ValueError: flash-attention 4 is said, and is not there or not for this GPU.
        RuntimeError: it is there, and cannot be imported.
    """
    if device.type != "cuda":
        yield
        return
    if _takes_flash(device, kernel):
        flash.activate(simulated=is_simulated())
    else:
        flash.deactivate()
    with sdpa_kernel(_FLASH_FIRST if flash.is_active() else _BEST_FIRST, set_priority=True):
        yield


def _takes_flash(device: torch.device, kernel: AttentionKernel | None) -> bool:
    fits = flash.is_for(torch.cuda.get_device_capability(device))
    if kernel is None:
        return fits and flash.is_installed() and not flash.is_replaced()
    if kernel == "cudnn":
        return False
    if not fits:
        raise ValueError(
            f'plan.attention = "{kernel}" is for GPUs of kinds Hopper and Blackwell, not for this one; leave it out'
        )
    if not is_simulated() and not flash.is_installed():
        raise ValueError(
            f"plan.attention = \"{kernel}\" needs the package {flash.PACKAGE}: pip install 'shoal[flash]'; or leave it out"
        )
    return True
