"""Which attention kernels may run, best first."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

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
        ValueError: flash-attention 4 is said, and is not there, not for this GPU, or another one is active in this process.
        RuntimeError: it is said, and what is installed cannot be used.
    """
    if device.type != "cuda":
        yield
        return
    if _takes_flash(device, kernel):
        flash.activate(simulated=is_simulated())
    else:
        flash.deactivate()
    first = flash.is_active() or (kernel is None and flash.is_replaced())
    with sdpa_kernel(_FLASH_FIRST if first else _BEST_FIRST, set_priority=True):
        yield


def _takes_flash(device: torch.device, kernel: AttentionKernel | None) -> bool:
    fits = flash.is_for(torch.cuda.get_device_capability(device))
    if kernel is None:
        return fits and flash.is_installed() and not flash.is_replaced() and _can_be_used()
    if kernel == "cudnn":
        return False
    if not fits:
        raise ValueError(
            f'plan.attention = "{kernel}" is for GPUs of kinds Hopper and Blackwell, not for this one; leave it out'
        )
    if flash.is_replaced():
        raise ValueError(
            f'plan.attention = "{kernel}": this process has "{current_flash_attention_impl()}" in its place '
            "(torch.nn.attention.activate_flash_attention_impl); leave one of them out"
        )
    if not is_simulated():
        check_installed(kernel)
    return True


def check_installed(kernel: AttentionKernel | None) -> None:
    """Raises ValueError if a kernel is said whose package is not installed."""
    if kernel == "flash4" and not flash.is_installed():
        raise ValueError(
            f"plan.attention = \"{kernel}\" needs the package {flash.PACKAGE}: pip install 'shoal[flash]'; or leave it out"
        )


def _can_be_used() -> bool:
    if is_simulated() or not (why := flash.why_not()):
        return True
    warnings.warn(f"attention by cuDNN, and not by flash-attention 4: {why}", stacklevel=2)
    return False
