"""Transposed copies are what torch makes, and torchao's products get from them the operands that it would have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.parallel.transpose import laid_out, transposed

KINDS = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 128), (200, 48), (16, 300), (1, 16)])
def test_it_is_the_transposed_matrix(shape: tuple[int, int], kind: torch.dtype, device: str) -> None:
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    found = transposed(raw.view(kind))
    assert found.dtype == kind and found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), raw.t())


def test_compilers_see_what_it_gives() -> None:
    torch.library.opcheck(transposed, (torch.zeros(4, 6, dtype=torch.uint8),))


@pytest.mark.parametrize("left_turned", [False, True])
@pytest.mark.parametrize("right_turned", [False, True])
@pytest.mark.parametrize("inner", [32, 24])  # torchao pads to 16s
def test_operands_are_those_of_torchao(left_turned: bool, right_turned: bool, inner: int) -> None:
    operators = pytest.importorskip("torchao.float8.float8_ops")
    given = getattr(operators.preprocess_addmm, "__wrapped__", operators.preprocess_addmm)
    asked = operand((16, inner), left_turned, "INPUT"), operand((inner, 48), right_turned, "WEIGHT")
    expected, found = given(*asked), laid_out(given)(*asked)
    for one, other in zip(expected, found, strict=True):
        if one.element_size() == 1:
            assert one.stride() == other.stride()
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        assert torch.equal(one, other)


def operand(shape: tuple[int, int], turned: bool, role: str) -> Any:
    """Of a product in float8; turned: column-major."""
    linear = pytest.importorskip("torchao.float8.float8_linear")
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    if turned:
        numbers = numbers.t().contiguous().t()
    products = linear.LinearMMConfig(*(linear.ScaledMMConfig(False, True, False, True) for _ in range(3)))
    return hp_tensor_to_float8_dynamic(
        numbers, torch.float8_e4m3fn, products, gemm_input_role=linear.GemmInputRole[role]
    )
