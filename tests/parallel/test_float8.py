"""float8 is what it says, the same under every plan, and refused where it cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config import parse
from shoal.job import Precision
from shoal.models.llama import Llama
from shoal.parallel.apply import parallelize
from shoal.parallel.float8 import apply_float8
from shoal.plan import Plan
from shoal.verify.run import verify
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import DIMS

pytest.importorskip("torchao")

WIDE = DIMS._replace(dim=64, ffn=40)  # 40 is no multiple of 16
CPU = torch.device("cpu")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def narrow(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """`x` as 8 bits see it, scaled so that the largest element (of all, or along a dim) is the largest number there is."""
    largest = x.float().abs().amax() if dim is None else x.float().abs().amax(dim, keepdim=True)
    scale = LARGEST[kind] / largest.double().clamp(min=1e-12)
    if dim is not None:  # rows are scaled by powers of 2, so that scaling rounds nothing
        scale = scale.log2().floor().exp2()
    return (x.float() * scale.float()).to(kind).double() / scale


@pytest.mark.parametrize("precision", ["float8", "float8_rowwise"])
def test_a_linear_multiplies_numbers_of_8_bits(precision: Precision) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 48, generator=generator).bfloat16()
    above = torch.randn(32, 16, generator=generator).bfloat16()
    block = nn.Sequential(nn.Linear(48, 16, bias=False)).bfloat16()
    weight = block.get_parameter("0.weight")
    apply_float8([block], precision, Plan(), CPU)
    given = x.clone().requires_grad_()
    made = block(given)
    made.backward(above)
    rows = precision == "float8_rowwise"
    e4m3 = torch.float8_e4m3fn
    gradient_kind = e4m3 if rows else torch.float8_e5m2

    def along(dim: int) -> int | None:
        return dim if rows else None

    expected = narrow(x, e4m3, along(1)) @ narrow(weight.detach(), e4m3, along(1)).T
    back = narrow(above, gradient_kind, along(1)) @ narrow(weight.detach(), e4m3, along(0))
    of_weight = narrow(above, gradient_kind, along(0)).T @ narrow(x, e4m3, along(0))
    for found, right in ((made, expected), (given.grad, back), (weight.grad, of_weight)):
        assert found is not None
        # the product is rounded to bf16; what 8 bits change is ten times that
        torch.testing.assert_close(found.double(), right, rtol=2**-7, atol=2**-7 * float(right.abs().max()))
    error = (expected - x.double() @ weight.detach().double().T).norm() / expected.norm()
    assert 0.005 < error < 0.06


def converted(world: World, plan: Plan) -> set[str]:
    model = parallelize(partial(Llama, WIDE), plan, world, precision="float8")
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


def test_linears_of_blocks_are_converted_as_far_as_their_dims_are_multiples_of_16() -> None:
    attention = {
        f"blocks.{block}.attention.{name}"
        for block in range(2)
        for name in ("query", "key", "value", "output")
    }
    for plan in (Plan(), Plan(shard=2)):
        (found, *_) = run_ranks(plan.world_size, converted, plan)
        assert {name.removeprefix("module.") for name in found} == attention


PLANS: list[dict[str, Any]] = [
    {"shard": 2},
    {"replicate": 2},
    {"tensor": 2},
    {"context": 2},
    {"pipeline": 2},
    {"shard": 2, "recompute": "selective", "offload": ["activations"]},
]


GATHERED: list[dict[str, Any]] = [{"shard": 2, "zero": 3}, {"pipeline": 2, "shard": 2}]


@pytest.mark.usefixtures("warm_nursery")
@pytest.mark.parametrize(("precision", "all_keys"), [("float8", PLANS), ("float8_gather", GATHERED)])
def test_every_plan_computes_what_one_device_does(
    precision: Precision, all_keys: list[dict[str, Any]]
) -> None:
    """`verify` measures how far one device in float8 is from the exact numbers, and allows a plan 8 times that."""
    table = {
        "model": {"preset": "1m"},
        "data": {"source": "synthetic", "vocab": 512, "seq_len": 64},
        "train": {"steps": 1, "global_batch": 4, "precision": precision},
    }
    plans = [Plan.model_validate(keys) for keys in all_keys]
    for verdict in verify(parse(table, where="a test"), plans, steps=3):
        assert verdict.same, (verdict.plan.describe(), verdict.comparison, verdict.problem)


def test_what_cannot_be_float8_is_refused() -> None:
    small = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"no linear of the model's blocks .* multiples of 16"):
        apply_float8([small], "float8", Plan(), CPU)
    block = nn.Sequential(nn.Linear(32, 16))
    with pytest.raises(ValueError, match=r"plan\.tensor = 2 leaves .*multiples of 32"):
        apply_float8([block], "float8", Plan(tensor=2), CPU)
    assert type(block[0]) is nn.Linear  # nothing is converted by a call that fails


def test_a_device_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9 .*A100 has 8\.0; use \"bf16\""):
        apply_float8([nn.Sequential(nn.Linear(16, 16))], "float8", Plan(), torch.device("cuda"))
