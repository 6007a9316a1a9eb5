"""Fake tensors of a GPU compute backward where there is no GPU, by the kernels that the GPU would take; and then nothing is left.

A test that fails here with a new torch names the change in shoal/planner/fake_device.py that this torch no longer takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.parallel import flash
from shoal.planner.fake_device import FakeDevice, fake_device, replace
from shoal.planner.pieces import Pieces
from shoal.planner.workspace import scratch_bytes

GPU = torch.device("cuda", 0)


class Names(TorchDispatchMode):
    """Keeps the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def operators(capability: tuple[int, int] = (9, 0)) -> Iterator[list[str]]:
    with fake_device(FakeDevice("cuda", capability)), FakeTensorMode(), Names() as names:
        yield names.seen


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device=GPU, dtype=dtype, requires_grad=True)


def test_backward_runs_on_fake_tensors_of_a_gpu() -> None:
    with operators():
        weight = on_gpu(8, 8)
        (on_gpu(4, 8) @ weight).sum().backward()
        assert isinstance(weight.grad, FakeTensor) and weight.grad.device == GPU


def test_it_runs_again_after_a_real_backward() -> None:
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))  # pyrefly: ignore[bad-argument-type]
        test_backward_runs_on_fake_tensors_of_a_gpu()


@pytest.mark.parametrize(
    ("capability", "dtype", "kv_heads", "kernel"),
    [
        ((9, 0), torch.bfloat16, 2, "cudnn"),
        ((8, 0), torch.bfloat16, 2, "flash"),
        ((9, 0), torch.float32, 4, "efficient"),
        ((9, 0), torch.float32, 2, "math"),
    ],
)
def test_attention_takes_the_kernel_that_the_gpu_would(
    capability: tuple[int, int], dtype: torch.dtype, kv_heads: int, kernel: str
) -> None:
    with operators(capability) as seen:
        query, key, value = (on_gpu(2, heads, 16, 32, dtype=dtype) for heads in (4, kv_heads, kv_heads))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out.sum().backward()
        assert out.shape == query.shape and key.grad is not None and key.grad.shape == key.shape
    fused = [name for name in seen if f"{kernel}_attention" in name]
    scores = any("softmax" in name for name in seen)
    assert scores if kernel == "math" else len(fused) == 2 and not scores


def test_flash_attention_4_is_taken_where_it_is_active_and_there_is_no_mask() -> None:
    for masked, kernel in ((False, "flash"), (True, "cudnn")):
        with operators() as seen:
            flash.activate(simulated=True)
            query, key = on_gpu(2, 4, 16, 32), on_gpu(2, 2, 16, 32)
            mask = torch.empty(2, 1, 16, 16, dtype=torch.bool, device=GPU) if masked else None
            out = F.scaled_dot_product_attention(
                query, key, key, attn_mask=mask, is_causal=not masked, enable_gqa=True
            )
            out.sum().backward()
        assert not flash.is_active()  # it ends with the simulated device
        assert len([name for name in seen if f"{kernel}_attention" in name]) == 2


def test_backward_of_flash_attention_takes_memory_by_its_kernel() -> None:
    query, key = torch.empty(2, 4, 200, 40, dtype=torch.bfloat16), torch.empty(2, 2, 200, 40)
    key = key.bfloat16()
    args = (query, query, key, key, query, None, None, None, 200, 200, 0.0, True)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    sums, rows, wide = 2 * 4 * 256 * 64 * 4, 2 * 4 * 256 * 4, 2 * 4 * 200 * 40 * 2
    assert scratch_bytes(operator, args) == [sums, rows, wide, wide]
    flash.activate(simulated=True)
    try:
        assert scratch_bytes(operator, args) == [sums, rows, rows, sums // 2, sums // 2]
        dropped = (*args[:10], 0.1, True)
        assert scratch_bytes(operator, dropped) == [sums, rows, wide, wide]
    finally:
        flash.deactivate()


def test_rms_norm_is_one_kernel_and_so_is_its_gradient() -> None:
    with operators() as seen:
        F.rms_norm(on_gpu(4, 8), (8,), on_gpu(8)).sum().backward()
    assert [name for name in seen if "rms_norm" in name] == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    assert "rsqrt" not in seen


def test_norms_of_gradients_take_all_tensors_at_once() -> None:
    with operators() as seen:
        nn.utils.get_total_norm([on_gpu(4), on_gpu(5)])
    assert any(name.startswith("_foreach_norm") for name in seen)


def test_a_module_moves_to_the_gpu_with_its_tied_parameters() -> None:
    with operators():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model.to(GPU)
        assert model[0].weight.device == GPU and model[0].weight is model[1].weight


def test_a_tensor_whose_data_is_replaced_is_where_the_new_data_is() -> None:
    with operators():
        weight = nn.Parameter(torch.empty(3))
        weight.data = weight.data.to(GPU)
        assert weight.device == GPU and (weight * 2).device == GPU


def test_streams_are_entered_and_left() -> None:
    with fake_device(FakeDevice("cuda")) as streams:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert streams.current is side and torch.cuda.current_stream() is side
        assert streams.current is streams.default


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (3, 4), (9, 2)])
def test_parts_are_those_of_torch(rows: int, ranks: int) -> None:
    x = torch.arange(rows * 2).view(rows, 2)
    right = list(x.chunk(ranks))
    right += [x.new_empty(0)] * (ranks - len(right))
    made = Pieces(x, ranks, 0)
    assert len(made) == ranks and all(torch.equal(made[rank], right[rank]) for rank in range(ranks))


def test_nothing_is_left() -> None:
    names = ("Stream", "Event", "current_stream", "device_count", "manual_seed", "get_device_capability")
    before = [getattr(torch.cuda, name) for name in names]
    listed, apply = list(optimizers._foreach_supported_types), nn.Module._apply
    with fake_device(FakeDevice("cuda")):
        assert torch.cuda.device_count() == 1 and nn.Module._apply is not apply
    assert [getattr(torch.cuda, name) for name in names] == before
    assert optimizers._foreach_supported_types == listed and nn.Module._apply is apply
    assert not torch.cuda.is_available() and torch.autograd.grad_mode is not None
    x = torch.ones(2, 2, 4, 8, requires_grad=True)
    F.rms_norm(F.scaled_dot_product_attention(x, x, x), (8,)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_torch_without_what_is_changed_is_refused_by_name() -> None:
    with (
        pytest.raises(RuntimeError, match=r"has no torch\.cuda\.nosuch, which simulation changes"),
        ExitStack() as undo,
    ):
        replace(undo, torch.cuda, "nosuch", None)
