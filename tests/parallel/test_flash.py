"""flash-attention 4 under torch's operators: a stand-in for the package on a CPU, the package itself on a GPU that it is for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from shoal.parallel import flash
from shoal.train.kernels import attention_kernels

aten: Any = torch.ops.aten
GPU = torch.device("cuda")
HAS_IT = (
    flash.is_installed() and torch.cuda.is_available() and flash.is_for(torch.cuda.get_device_capability())
)


needs_it = pytest.mark.skipif(not HAS_IT, reason="needs flash-attn-4 and a Hopper or Blackwell GPU")


class Package:
    """What flash_attn.cute.interface offers, (B, T, H, E), in plain torch."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.deterministic: list[bool] = []

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: Any,
        causal: bool,
        return_lse: bool,
        out: Tensor,
    ) -> tuple[Any, ...]:
        assert return_lse
        self.calls.append("forward")
        found, lse = attention(q, k, v, softmax_scale, causal)
        out.copy_(found)
        return out, lse, None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: Any,
        causal: bool,
        deterministic: bool,
        **places: Tensor,
    ) -> None:
        self.calls.append("backward")
        self.deterministic.append(deterministic)
        assert all(x.stride(-1) == 1 and 0 not in x.stride() for x in (q, k, v, out, dout))
        found, again = attention(q, k, v, softmax_scale, causal)
        torch.testing.assert_close(again, lse)
        torch.testing.assert_close(found.to(out.dtype), out)
        # by hand, since operators are below autograd: (B, H, T, E), keys and values once for each head of queries
        times = q.shape[2] // k.shape[2]
        query, key, value, grad, made = (x.transpose(1, 2).float() for x in (q, k, v, dout, out))
        key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        scale = softmax_scale or 1 / math.sqrt(q.shape[-1])
        shares = (scores_of(query, key, scale, causal) - lse[..., None]).exp()
        inner = shares * (grad @ value.mT - (grad * made).sum(-1, keepdim=True)) * scale
        places["dq"].copy_((inner @ key).transpose(1, 2))
        for name, x in (("dk", inner.mT @ query), ("dv", shares.mT @ grad)):
            places[name].copy_(x.unflatten(1, (-1, times)).sum(2).transpose(1, 2))


def scores_of(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    scores = query @ key.mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Out (B, T, H, E) and the logarithms of sums, (B, H, T), in fp32."""
    query, key, value = (x.transpose(1, 2).float() for x in (q, k, v))
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    scores = scores_of(query, key, scale or 1 / math.sqrt(query.shape[-1]), causal)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


@pytest.fixture
def package() -> Iterator[Package]:
    """Both operators on a CPU, over a stand-in; below them, as torch's own, kernels that only say so."""

    def torchs(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("torch's own")

    own = torch.library.Library("aten", "IMPL")
    for name in ("", "_backward"):
        own.impl(f"_scaled_dot_product_flash_attention{name}", torchs, "CPU")
    package = Package()
    operators = flash._Operators(flash.Kernels(package), "CPU")
    yield package
    operators.remove()
    own._destroy()


def whole(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)


def projected(heads: int) -> Tensor:
    """(B, H, T, E) as projections leave it: heads are not apart in memory."""
    return torch.randn(2, 24, heads, 16).bfloat16().transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_out_and_gradients_are_those_of_attention(
    package: Package, kv_heads: int, causal: bool, scale: float | None
) -> None:
    torch.manual_seed(0)
    query, key, value = projected(4), projected(kv_heads), projected(kv_heads)
    gradient = torch.randn_like(query)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    given = (gradient, query, key, value, out, lse, *rest[:4], 0.0, causal, *rest[4:6])
    found = aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)
    leaves = [x.float().requires_grad_() for x in (query, key, value)]
    truth = whole(*leaves, causal=causal, scale=scale)
    right = torch.autograd.grad(truth, leaves, gradient.float())
    assert package.calls == ["forward", "backward"]
    assert package.deterministic == [False]
    # results are rounded to the 8 bits of bf16, and gradients are made with the rounded output
    for mine, its, like in zip((out, *found), (truth, *right), (query, query, key, value), strict=True):
        assert mine.dtype == torch.bfloat16
        assert mine.stride() == torch.empty_like(like).stride()  # as torch's shapes for compiled blocks say
        torch.testing.assert_close(mine.float(), its, rtol=2**-7, atol=its.abs().max().item() * 2**-7)


def test_one_number_as_the_gradient_of_all_is_laid_out_for_the_package(package: Package) -> None:
    query, key = projected(4), projected(2)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(query, key, key, 0.0, True)
    gradient = torch.ones((), dtype=out.dtype).expand_as(out)
    aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, key, out, lse, *rest[:4], 0.0, True, *rest[4:6]
    )
    assert package.calls == ["forward", "backward"]


def test_bits_are_the_same_in_every_run_if_torch_is_told_so(package: Package) -> None:
    query = projected(4)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(query, query, query, 0.0, True)
    torch.use_deterministic_algorithms(True)
    try:
        aten._scaled_dot_product_flash_attention_backward(
            out, query, query, query, out, lse, *rest[:4], 0.0, True, *rest[4:6]
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.deterministic == [True]


def test_what_the_package_does_not_take_is_left_to_torch(package: Package) -> None:
    query = projected(4)
    wide = torch.randn(1, 2, 8, 256).bfloat16()
    for x, dropout in ((query, 0.1), (query.float(), 0.0), (query[..., :12], 0.0), (wide, 0.0)):
        with (
            pytest.raises(NotImplementedError, match="torch's own"),
            pytest.warns(match=f"not for heads of {x.shape[-1]} with dropout {dropout:g}: .*cudnn"),
        ):
            aten._scaled_dot_product_flash_attention(x, x, x, dropout, True)
    out, lse, *rest = aten._scaled_dot_product_flash_attention(query, query, query, 0.0, True)
    with pytest.raises(NotImplementedError, match="torch's own"):
        aten._scaled_dot_product_flash_attention_backward(
            out, query, query, query, out, lse, *rest[:4], 0.1, True, *rest[4:6]
        )
    assert package.calls == ["forward"]


def test_a_simulated_world_only_says_that_it_is_active() -> None:
    before = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
    flash.activate(simulated=True)
    try:
        assert flash.is_active()
        assert not flash.is_replaced()
        assert torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention") == before
    finally:
        flash.deactivate()
    assert not flash.is_active()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is not there, and a package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(flash, "is_installed", lambda: True)


@pytest.mark.parametrize("interface", [None, SimpleNamespace(_flash_attn_fwd=lambda q, causal: q)])
def test_a_package_that_cannot_be_used_is_named_and_left_out_unless_it_is_said(
    monkeypatch: pytest.MonkeyPatch, hopper: None, interface: Any
) -> None:
    def found(name: str) -> Any:
        if interface is None:
            raise ImportError(f"no {name}")
        return interface

    monkeypatch.setattr(flash.importlib, "import_module", found)
    monkeypatch.setattr(flash.importlib.metadata, "version", lambda _: "5.0")
    why = (
        "cannot be imported: no flash_attn" if interface is None else "another _flash_attn_fwd than 4.0.0b36"
    )
    flash.why_not.cache_clear()
    try:
        with (
            pytest.raises(RuntimeError, match=f"flash-attn-4 5.0 .*{why}.*cudnn"),
            attention_kernels(GPU, "flash4"),
        ):
            pass
        with pytest.warns(match=f"by cuDNN, and not by flash-attention 4: .*{why}"), attention_kernels(GPU):
            assert not flash.is_active()
    finally:
        flash.why_not.cache_clear()


def test_what_a_program_has_put_into_torchs_registry_stays(hopper: None) -> None:
    register_flash_attention_impl("theirs", register_fn=flash._Nothing)
    activate_flash_attention_impl("theirs")
    try:
        for kernel in (None, "cudnn"):
            with attention_kernels(GPU, kernel):
                assert current_flash_attention_impl() == "theirs"
                first = torch._C._get_sdp_priority_order()[0]
                flash_first = first == SDPBackend.FLASH_ATTENTION.value  # pyrefly: ignore[missing-attribute]
                assert flash_first == (kernel is None)
        with pytest.raises(ValueError, match=r"this process has .theirs. in its place"):
            attention_kernels(GPU, "flash4").__enter__()
    finally:
        restore_flash_attention_impl()


def test_blocks_are_compiled_for_the_kernel_that_they_run_with(tmp_path: Path) -> None:
    """torch's caches, in memory and on disk, do not know of it: the kernel is chosen as a block is compiled."""
    for active, finds in ((False, 0), (True, 0), (True, 1)):
        said = subprocess.run(
            [sys.executable, __file__, "compiled", str(int(active))],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        # at first in the kernel's absence or presence, found on disk or not; then after it was put in or taken out
        assert said.stdout.split() == [str(finds), "1"], (active, said.stdout, said.stderr[-2000:])


@pytest.mark.parametrize(
    ("kernel", "capability", "installed", "active"),
    [
        (None, (9, 0), True, True),
        (None, (9, 0), False, False),
        (None, (8, 0), True, False),
        ("cudnn", (9, 0), True, False),
        ("flash4", (10, 0), True, True),
        (
            "flash4",
            (9, 0),
            False,
            "needs the package flash-attn-4: pip install 'shoal.flash.'; or leave it out",
        ),
        ("flash4", (8, 0), True, "for GPUs of kinds Hopper and Blackwell, not for this one; leave it out"),
    ],
)
def test_which_kernel_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    capability: tuple[int, int],
    installed: bool,
    active: bool | str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(flash, "is_installed", lambda: installed)
    monkeypatch.setattr(flash, "_register", flash._Nothing)
    monkeypatch.setattr(flash, "why_not", lambda: "")
    try:
        if isinstance(active, str):
            with pytest.raises(ValueError, match=active), attention_kernels(GPU, kernel):
                pass
            return
        with attention_kernels(GPU, kernel):
            assert flash.is_active() == active
        with attention_kernels(GPU, "cudnn"):
            assert not flash.is_active()
    finally:
        flash.deactivate()


@needs_it
def test_on_a_gpu_it_is_what_a_process_compiles_first() -> None:
    """torch has an order of its own, which it sets at a process's first attention."""
    found = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert found.stdout == "forward\nbackward\n", found.stderr


@needs_it
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_on_a_gpu_it_agrees_with_fp32(width: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, 333, heads, width, device="cuda").transpose(1, 2).requires_grad_()
        for heads in (8, kv_heads, kv_heads)
    ]
    half = [x.detach().bfloat16().requires_grad_() for x in leaves]
    truth = whole(*leaves)
    right = torch.autograd.grad(truth.sum(), leaves)
    try:
        for call in (torch.compile(whole), whole):
            with attention_kernels(GPU, "flash4"):
                out = call(*half)
            found = torch.autograd.grad(out.sum(), half)
            for mine, its in zip((out, *found), (truth, *right), strict=True):
                assert (mine.float() - its).norm() < 1e-2 * its.norm()
    finally:
        flash.deactivate()


def told(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Work that says its name."""

    def run(*given: Any) -> Any:
        print(name)
        return work(*given)

    return run


def say_what_is_found(active: bool) -> None:
    """Whether torch finds a compiled function on disk; and whether it compiles again when the kernel changes."""
    from torch._dynamo.utils import counters

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(1, 2, 64, 16, requires_grad=True)
    if active:
        flash.activate(simulated=True)
    torch.compile(attend)(x).sum().backward()
    print(counters["aot_autograd"]["autograd_cache_hit"])
    counters.clear()
    if active:
        flash.deactivate()
    else:
        flash.activate(simulated=True)
    torch.compile(attend)(x)
    print(counters["stats"]["unique_graphs"])


def say_what_runs() -> None:
    for name in ("forward", "backward"):
        setattr(flash.Kernels, name, told(name, getattr(flash.Kernels, name)))
    x = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with attention_kernels(GPU):
        torch.compile(whole)(x, x, x).sum().backward()


if __name__ == "__main__":
    if sys.argv[1:]:
        say_what_is_found(sys.argv[2] == "1")
    else:
        say_what_runs()
