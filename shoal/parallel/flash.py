"""flash-attention 4 (the package flash-attn-4), in place of torch's own flash attention on Hopper and Blackwell.

torch has a registry for such kernels, and an entry of its own for this package, which fits an early form of it: it unpacks two
results where there are five now (torch 2.13, flash-attn-4 4.0.0b36). So Shoal makes its own entry. It changes two operators of
CUDA devices, those under `scaled_dot_product_attention`: compiled blocks, Hugging Face's models and one's own all reach them.

Measured on an H200 at its power limit, causal, 32 heads on 8, bf16 (benchmarks/results/kernels_1xh200.json): forward and
backward of 8,192 tokens and width 128 take 3.65 ms, cuDNN's 4.03; of 4 x 2,048 tokens and width 64 0.74, cuDNN's 0.82.

Source: Dao et al., arXiv:2205.14135; Shah et al., arXiv:2407.08608.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from shoal.parallel.attend import HALF_TYPES

NAME = "shoal: flash-attn-4"
PACKAGE, INTERFACE = "flash-attn-4", "flash_attn.cute.interface"
CALLED = {
    "_flash_attn_fwd": {"softmax_scale", "causal", "return_lse", "out"},
    "_flash_attn_bwd": {"softmax_scale", "causal", "deterministic", "dq", "dk", "dv"},
}
"""its own functions that are called, and by which words"""
WIDEST = 128
"""of a head. The package takes wider ones on Hopper alone, where they were not measured"""
_ALIGNED = 8
"""elements of 2 bytes: what is copied by the GPU's tensor memory accelerator begins at multiples of 16 bytes"""


def is_active() -> bool:
    """Whether flash-attention 4 is what runs in this process; in a simulated world, whether it would."""
    return current_flash_attention_impl() == NAME


def is_replaced() -> bool:
    """Whether somebody's program has put another kernel into torch's registry, which is then left there."""
    return current_flash_attention_impl() not in (None, NAME)


@functools.cache
def is_installed() -> bool:
    """Whether the package is there; it is not imported, which takes seconds."""
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_for(capability: tuple[int, int]) -> bool:
    """Whether the package has forward and backward for a GPU: Hopper and Blackwell (AMD's MI300 has 9.4)."""
    return capability in ((9, 0), (10, 0), (10, 3))


@functools.cache
def why_not() -> str:
    """Why the package cannot be used, though it is installed; nothing if it can. It is imported for that, once a process."""
    version = importlib.metadata.version(PACKAGE)
    try:
        interface = importlib.import_module(INTERFACE)
    except Exception as error:
        return f"the package {PACKAGE} {version} cannot be imported: {error}"
    for name, words in CALLED.items():
        function = getattr(interface, name, None)
        if function is None or not words <= inspect.signature(function).parameters.keys():
            return (
                f"the package {PACKAGE} {version} has another {name} than 4.0.0b36, for which this is written"
            )
    return ""


def activate(*, simulated: bool) -> None:
    """Let torch's flash attention be flash-attention 4, in all of this process; in a simulated world only say so.

    Raises:
        RuntimeError: the package cannot be used.
    """
    if is_active():
        return
    register_flash_attention_impl(NAME, register_fn=_Nothing if simulated else _register)
    activate_flash_attention_impl(NAME)
    _forget_compiled()


def deactivate() -> None:
    if is_active():
        restore_flash_attention_impl()
        _forget_compiled()


def _forget_compiled() -> None:
    """Have blocks compiled again, and found in torch's cache on disk by this kernel's name or without it.

    Which kernel a block has is decided as it is compiled, and torch's caches do not ask (torch 2.11 and 2.13).
    """
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(NAME, "") + NAME * is_active()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


class _Nothing:
    """What stands for operators in a simulated world."""

    def remove(self) -> None: ...


class _Operators:
    """Two operators as they are while flash-attention 4 is active."""

    def __init__(self, kernels: Kernels, key: str) -> None:
        aten = torch.ops.aten
        # what torch has for the inputs that flash-attention 4 does not take
        self._forward = torch.library.get_kernel(aten._scaled_dot_product_flash_attention.default, key)
        self._backward = torch.library.get_kernel(
            aten._scaled_dot_product_flash_attention_backward.default, key
        )
        self._kernels = kernels
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that it is replaced
            for name, function in (("", self.forward), ("_backward", self.backward)):
                operator = f"_scaled_dot_product_flash_attention{name}"
                self._library.impl(operator, function, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """(B, H, T, E) of queries to (B, K, S, E): out, sums' logarithms, and seven that only torch's own kernel has use for."""
        if not takes(query, key, value, dropout_p) or return_debug_mask:
            _tell_slower(query, dropout_p)
            given = (query, key, value, dropout_p, is_causal, return_debug_mask)
            return self._forward.call_boxed(keys, *given, scale=scale)
        out = torch.empty_like(query)
        lse = self._kernels.forward(query, key, value, out, is_causal, scale)
        seed, offset = (query.new_empty(size, dtype=torch.uint64) for size in ((2,), ()))
        return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)

    def backward(
        self,
        keys: Any,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        starts: Tensor | None,
        key_starts: Tensor | None,
        length: int,
        key_length: int,
        dropout_p: float,
        is_causal: bool,
        seed: Tensor,
        offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not takes(query, key, value, dropout_p):
            given = (gradient, query, key, value, out, lse, starts, key_starts, length, key_length)
            return self._backward.call_boxed(keys, *given, dropout_p, is_causal, seed, offset, scale=scale)
        found = Gradients(*(torch.empty_like(x) for x in (query, key, value)))
        self._kernels.backward(gradient, query, key, value, out, lse, found, is_causal, scale)
        return found


def _tell_slower(query: Tensor, dropout_p: float) -> None:
    """Say once that a faster kernel was passed over: torch chooses before it knows that this one does not take the inputs."""
    if min(query.shape) > 0:
        warnings.warn(
            f"flash-attention 4 is not for heads of {query.shape[-1]} with dropout {dropout_p:g}: torch's own flash attention "
            'computes them, slower than cuDNN\'s would; set plan.attention = "cudnn" for this model',
            stacklevel=2,
        )


class Gradients(NamedTuple):
    """Memory for gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


def takes(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    """Whether flash-attention 4 is for these inputs."""
    widths = {x.shape[-1] for x in (query, key, value)}
    return (
        dropout_p == 0.0
        and query.dtype in HALF_TYPES
        and len(widths) == 1
        and max(widths) <= WIDEST
        and max(widths) % _ALIGNED == 0
        and min(query.numel(), key.numel()) > 0
    )


class Kernels:
    """The package's two functions, in torch's order of dims: (B, H, T, E), where the package has (B, T, H, E).

    Both are its own, not its public ones (4.0.0b36): the public function is an autograd function, which compiled blocks cannot
    have as one operator, and offers no backward by itself (github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py).
    """

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, causal: bool, scale: float | None
    ) -> Tensor:
        """Write `out`, and return the logarithms of sums of exponentials, (B, H, T)."""
        given = (_by_token(_aligned(x)) for x in (query, key, value))
        found = self._interface._flash_attn_fwd(
            *given, softmax_scale=scale, causal=causal, return_lse=True, out=_by_token(out)
        )
        return found[1].contiguous()

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        found: Gradients,
        causal: bool,
        scale: float | None,
    ) -> None:
        """Write gradients into `found`."""
        given = (_by_token(_aligned(x)) for x in (query, key, value, out, gradient))
        places = {f"d{name}": _by_token(x) for name, x in zip("qkv", found, strict=True)}
        self._interface._flash_attn_bwd(
            *given,
            lse.contiguous(),
            softmax_scale=scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **places,
        )


def _by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _aligned(x: Tensor) -> Tensor:
    """The tensor itself, or a copy, if its memory is not as the GPU copies it; a gradient may be one number for all."""
    fits = x.stride(-1) == 1 and all(
        stride > 0 and stride % _ALIGNED == 0
        for stride, size in zip(x.stride()[:-1], x.shape, strict=False)
        if size > 1
    )
    return x if fits and x.data_ptr() % (2 * _ALIGNED) == 0 else x.contiguous()


def _register() -> _Operators:
    if why := why_not():
        raise RuntimeError(f'{why}; install that one, or set plan.attention = "cudnn"')
    _settle_order()
    return _Operators(Kernels(importlib.import_module(INTERFACE)), "CUDA")


def _settle_order() -> None:
    """Have a process's first attention behind it, at which torch puts cuDNN first, whatever order it was told before.

    (sdp_utils.cpp: priority_order_init_; seen with torch 2.11.) Blocks that are compiled then would keep cuDNN's kernel.
    """
    x = torch.zeros(1, 1, 1, _ALIGNED, dtype=torch.float16, device="cuda")
    F.scaled_dot_product_attention(x, x, x)
