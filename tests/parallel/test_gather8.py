"""Weights gathered in float8 are those that torchao makes of the whole, and follow their masters."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.job import Precision
from shoal.models.llama import Llama
from shoal.parallel.apply import parallelize
from shoal.parallel.gather8 import narrowed
from shoal.parallel.shard import reshard, sharded_parameters
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train import toy
from tests.train.toy import DIMS

pytest.importorskip("torchao")

WIDE = DIMS._replace(dim=64, ffn=96)
DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 4096, 10_007])
def test_numbers_are_rounded_to_the_nearest_and_never_infinite(size: int, device: str) -> None:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 300
    numbers[:1] = 1e30
    scale = torch.tensor(1.25)
    found = narrowed(numbers.to(device), scale.to(device), torch.float8_e4m3fn)
    expected = (numbers * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert found.dtype == torch.float8_e4m3fn
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert bool(narrowed(torch.tensor([torch.nan]), scale, torch.float8_e4m3fn).isnan().all())


def test_compilers_see_what_it_gives() -> None:
    torch.library.opcheck(narrowed, (torch.ones(4, 6), torch.tensor(2.0), torch.float8_e4m3fn))


class Weight(NamedTuple):
    """As it is multiplied, and as torchao makes it of the whole master."""

    numbers: Tensor
    scale: Tensor
    expected_numbers: Tensor
    expected_scale: Tensor
    travelled: torch.dtype


def weights_of_second_forward(world: World, plan: Plan) -> dict[str, Weight]:
    """After the masters were changed, unevenly: the scales are no longer the first's."""
    model = parallelize(partial(Llama, WIDE), plan, world, precision="float8_gather")
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        model(tokens)
        reshard(model)
        for number, part in enumerate(parts_of(model)):
            part.mul_(2 + number)
            assert type(part) is Tensor
        masters = {name: whole(parameter) for name, parameter in model.named_parameters()}
        model(tokens)
    found = {}
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        module.unshard()
        for sharded in sharded_parameters(module):
            weight: Any = sharded.unsharded_param
            if hasattr(weight, "_scale"):
                name = sharded._param_fqn
                numbers, scale = as_torchao(masters[name])
                bytes_of = weight._data.view(torch.uint8).clone()
                sent = sharded.all_gather_outputs[0].dtype
                found[name] = Weight(bytes_of, weight._scale, numbers, scale, sent)
        module.reshard()
    return found


def parts_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]


def whole(parameter: nn.Parameter) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def as_torchao(master: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    made = hp_tensor_to_float8_dynamic(master, torch.float8_e4m3fn, LinearMMConfig())
    return made._data.view(torch.uint8), made._scale


@pytest.mark.parametrize(
    "plan",
    [Plan(shard=2), Plan(shard=3, zero=3), Plan(shard=2, zero=2), Plan(replicate=2, shard=2, zero=3)],
    ids=Plan.describe,
)
def test_a_weight_is_what_torchao_makes_of_the_whole(plan: Plan) -> None:
    for found in run_ranks(plan.world_size, weights_of_second_forward, plan):
        assert len(found) == 2 * 7  # the linears of two blocks
        for weight in found.values():
            assert torch.equal(weight.scale, weight.expected_scale)
            assert torch.equal(weight.numbers, weight.expected_numbers)
            assert weight.travelled == torch.uint8


def gathered_with(world: World, plan: Plan, precision: Precision) -> int:
    model = parallelize(partial(Llama, WIDE), plan, world, precision=precision)
    return sum(hasattr(part, "fsdp_pre_all_gather") for part in parts_of(model))


def test_other_plans_and_precisions_gather_as_before() -> None:
    assert run_ranks(4, gathered_with, Plan(tensor=2, shard=2), "float8_gather") == [0] * 4
    assert run_ranks(2, gathered_with, Plan(shard=2), "float8_rowwise") == [0, 0]
    assert run_ranks(2, gathered_with, Plan(shard=2), "float8") == [0, 0]


def scales_of_second_step(world: World, schedule: str) -> tuple[set[float], set[float]]:
    """With which weights were cast, and those of the weights as they were; masters are doubled between two steps."""
    plan = Plan.model_validate({"pipeline": 2, "shard": 2, "zero": 3, "schedule": schedule, "micro_batch": 1})
    deep = WIDE._replace(layers=4, vocab=52)
    model = parallelize(partial(Llama, deep), plan, world, precision="float8_gather")
    step = Step(model, NextToken(), AdamW(lr=1e-4), plan, world, precision="float8_gather")
    batches = [toy.part_of(toy.global_batch(number), number, plan, world.rank) for number in range(2)]
    step(batches[0])
    reshard(model)
    with torch.no_grad():
        for part in parts_of(model):
            part.mul_(2)
        expected = {float(as_torchao(whole(parameter))[1]) for parameter in model.parameters()}
    seen: set[float] = set()

    def cast(matrix: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
        seen.add(float(scale))
        return narrowed(matrix, scale, kind)

    with patch("shoal.parallel.gather8.narrowed", cast):
        step(batches[1])
    return seen, expected


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "looped_bfs"])
def test_a_schedule_that_gathers_before_any_forward_takes_scales_of_this_step(schedule: str) -> None:
    for seen, expected in run_ranks(4, scales_of_second_step, schedule):
        assert seen and seen <= expected


class Tied(nn.Module):
    """A linear whose weight another module reads as it is; the linear comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 96, bias=False)
        self.embedding = nn.Embedding(96, 64)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def train_tied(world: World) -> float:
    model = parallelize(Tied, Plan(shard=2, zero=3), world, precision="float8_gather")
    out = model(torch.arange(16).view(1, 16))
    out.float().square().mean().backward()
    return float(out.detach().float().norm())


def test_a_weight_that_another_module_reads_is_gathered_as_before() -> None:
    first, second = run_ranks(2, train_tied)
    assert first == second > 0


def replace_a_master(world: World) -> str:
    model = parallelize(partial(Llama, WIDE), Plan(shard=2, zero=3), world, precision="float8_gather")
    parameter: Any = model.get_parameter("blocks.1.attention.query.weight")
    parameter._local_tensor = parameter._local_tensor.clone()
    with pytest.raises(RuntimeError) as error:
        model(torch.arange(16).view(1, 16))
    return str(error.value)


def test_a_master_in_other_memory_is_refused() -> None:
    for message in run_ranks(2, replace_a_master):
        assert "memory of blocks.1.attention.query.weight was replaced" in message


def masters_left(world: World) -> int:
    """Of a model that was trained and let go of: parts whose memory is still held."""
    model = parallelize(partial(Llama, WIDE), Plan(shard=2, zero=2), world, precision="float8_gather")
    model(torch.arange(16).view(1, 16)).sum().backward()
    held = [weakref.ref(part.untyped_storage()) for part in parts_of(model)]
    del model
    gc.collect()
    return sum(storage() is not None for storage in held)


def test_a_model_that_is_let_go_of_is_freed() -> None:
    assert run_ranks(2, masters_left) == [0, 0]
