"""What blocks keep and compute twice: counted by operator, with numbers that stay the same to the bit."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.presets import LlamaDims
from shoal.parallel.apply import parallelize
from shoal.parallel.recompute import Choice, _Keep, _Reuse, kind_of
from shoal.plan import Plan
from shoal.train.objective import NextToken, Supervised
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import Outcome, run_all, run_ranks
from tests.train import moe_toy
from tests.train.toy import DEEP, OPTIMIZER, Record, build, global_batch, part_of, run_plan

UNTIED = DEEP._replace(tied=False)
FORWARD_MATMULS = 7 * DEEP.layers  # of blocks: query, key, value, output, gate, up, down


def plan_of(**keys: Any) -> Plan:
    return Plan.model_validate(keys)


class Operators(TorchDispatchMode):
    """Counts the kinds of operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if kind and not str(func.name()).endswith("backward"):
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def counted(world: World, plan: Plan) -> Counter[str]:
    """Operators of one step of the toy job with 4 blocks."""
    model = parallelize(partial(build, UNTIED), plan, world, seed=7)
    step = Step(model, NextToken(), OPTIMIZER, plan, world, total_steps=2)
    step(part_of(global_batch(0), 0, plan, world.rank))  # sharded parameters are laid out anew at first
    with Operators() as operators:
        step(part_of(global_batch(1), 1, plan, world.rank))
    return operators.counts


COUNTED: list[tuple[dict[str, Any], int, int]] = [
    (
        {"recompute": "full"},
        FORWARD_MATMULS - DEEP.layers,
        DEEP.layers,
    ),  # the last one's result is unused
    ({"recompute": "selective"}, 0, 0),
    (
        {"recompute": "selective", "recompute_keep": ["attention"]},
        FORWARD_MATMULS - DEEP.layers,
        0,
    ),
    ({"recompute": "selective", "recompute_keep": ["matmul"]}, 0, DEEP.layers),
    ({"recompute": "selective", "recompute_keep": []}, FORWARD_MATMULS - DEEP.layers, DEEP.layers),
    (  # of seven, the second, fourth and sixth
        {"recompute": "selective", "recompute_keep": ["attention", "every_second_matmul"]},
        3 * DEEP.layers,
        0,
    ),
    ({"recompute": "full", "recompute_every": 2}, (FORWARD_MATMULS - DEEP.layers) // 2, DEEP.layers // 2),
    ({"recompute": "full", "recompute_every": 3}, 2 * 6, 2),  # blocks 0 and 3
]


@cache
def counts_alone() -> dict[Plan, Outcome]:
    plans = [Plan(), *(plan_of(**keys) for keys, _, _ in COUNTED)]
    return run_all(1, counted, {plan: (plan,) for plan in plans})


@pytest.mark.parametrize(
    ("keys", "matmuls", "attentions"),
    COUNTED,
    ids=lambda value: " ".join(f"{v}" for v in value.values()) if isinstance(value, dict) else "",
)
def test_a_block_computes_twice_what_it_did_not_keep(
    keys: dict[str, Any], matmuls: int, attentions: int
) -> None:
    once = counts_alone()[Plan()].get()[0]
    assert once["matmul"] > FORWARD_MATMULS
    counts = counts_alone()[plan_of(**keys)].get()[0]
    assert counts["matmul"] - once["matmul"] == matmuls
    assert counts["attention"] - once["attention"] == attentions


def test_a_kept_result_is_freed_when_it_is_given_unless_backward_passes_again() -> None:
    weight = torch.randn(3, 3)
    for once in (True, False):
        kept: dict[Any, Any] = {}
        with _Keep(Choice(("matmul",)), kept):
            right = weight @ weight @ weight
        assert len(kept) == 2
        again = _Reuse(kept, once=once)
        for _ in range(1 if once else 2):
            with again:
                assert torch.equal(weight @ weight @ weight, right)
        assert len(kept) == (0 if once else 2)


def test_every_second_matmul_begins_with_the_first() -> None:
    choice, mm = Choice(("every_second_matmul",)), torch.ops.aten.mm.default
    assert [choice(mm) for _ in range(5)] == [True, False, True, False, True]


def test_reductions_of_a_tensor_axis_are_kept_and_gathers_made_again() -> None:
    none, kept, again = (
        run_ranks(2, counted, plan_of(tensor=2, recompute="selective", recompute_keep=keep))[0]
        if keep is not None
        else run_ranks(2, counted, plan_of(tensor=2))[0]
        for keep in (None, ["communication", "attention", "matmul"], ["attention", "matmul"])
    )
    assert kept["communication"] == none["communication"] > 0
    assert again["communication"] == none["communication"] + DEEP.layers  # attention's; the last is unused


@pytest.mark.parametrize(
    ("keys", "matmuls", "attentions"),
    [
        ({"recompute": "selective"}, 0, 0),
        # both passes go through each of a rank's 2 blocks of every micro-batch, the second as far as its last weight's input
        ({"recompute": "full"}, 2 * 6, 2 * 2),
    ],
    ids=["selective", "full"],
)
def test_a_backward_in_two_computes_twice_what_was_not_kept(
    keys: dict[str, Any], matmuls: int, attentions: int
) -> None:
    micro_batches = 4
    split = {"pipeline": 2, "schedule": "zbv", "micro_batch": 4}
    once = run_ranks(2, counted, plan_of(**split))
    for found, plain in zip(run_ranks(2, counted, plan_of(**split, **keys)), once, strict=True):
        assert 0 <= found["matmul"] - plain["matmul"] <= 2 * matmuls * micro_batches
        assert 0 <= found["attention"] - plain["attention"] <= attentions * micro_batches


SELECTIVE: dict[str, dict[str, Any]] = {
    "alone": {"micro_batch": 4},
    "few kept": {"micro_batch": 4, "recompute_keep": ["every_second_matmul"]},
    "bf16 casts": {"replicate": 2, "micro_batch": 4},
    "shard": {"shard": 2, "micro_batch": 4},
    "tensor": {"tensor": 2, "shard": 2, "recompute_keep": ["communication"]},
    "context": {"context": 2},
    "context by heads": {"context": 2, "context_by": "all_to_all"},
    "pipeline": {"pipeline": 2, "micro_batch": 4, "recompute_every": 3},
    "backward in two": {"pipeline": 2, "micro_batch": 4, "schedule": "zbv"},
}


def with_and_without(name: str) -> tuple[Plan, Plan]:
    keys = SELECTIVE[name]
    plain = plan_of(**{key: value for key, value in keys.items() if not key.startswith("recompute")})
    return plain.model_validate(
        {**plain.model_dump(exclude_unset=True), "recompute": "selective", **keys}
    ), plain


@cache
def trained(ranks: int) -> dict[tuple[str, str], Outcome]:
    pairs = {name: with_and_without(name) for name in SELECTIVE}
    cases: dict[tuple[str, str], tuple[object, ...]] = {
        (name, plan.recompute): (plan, "bf16" if plan.replicate > 1 else "fp64", OPTIMIZER, 3, UNTIED)
        for name, pair in pairs.items()
        for plan in pair
        if plan.world_size == ranks
    }
    return run_all(ranks, run_plan, cases)


@pytest.mark.parametrize("name", SELECTIVE)
def test_selective_recompute_changes_no_number(name: str) -> None:
    plan, plain = with_and_without(name)
    records, right = (trained(plan.world_size)[name, p.recompute].get() for p in (plan, plain))
    for record, expected in zip(records, right, strict=True):
        assert record.losses == expected.losses
        assert record.norms == expected.norms
        for name, weight in record.weights.items():
            assert torch.equal(weight, expected.weights[name]), name


@pytest.mark.parametrize("keys", [{"shard": 2}, {"tensor": 2, "shard": 2}])
def test_selective_recompute_goes_through_an_exchange_of_experts(keys: dict[str, Any]) -> None:
    plan = plan_of(**keys, expert=2, micro_batch=4)
    again = plan.model_copy(update={"recompute": "selective"})
    done = run_all(plan.world_size, moe_toy.train, {p.recompute: (p,) for p in (plan, again)})
    right, found = (done[p.recompute].get() for p in (plan, again))
    for record, expected in zip(found, right, strict=True):
        assert (record.losses, record.norms) == (expected.losses, expected.norms)
        for name, bias in record.biases.items():
            assert torch.equal(bias, expected.biases[name]), name


class NoBlocks(nn.Module):
    """Without repeated blocks, so that the whole is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def without_blocks(world: World, plan: Plan) -> tuple[float, int]:
    model = parallelize(NoBlocks, plan, world, seed=1)
    step = Step(model, Supervised(square), AdamW(lr=1e-2), plan, world)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with Operators() as operators:
        loss = step(StepBatch(0, (MicroBatch((x, x.flip(0)), 0, 8),))).loss
    return loss, operators.counts["matmul"]


@pytest.mark.parametrize("keys", [{}, {"shard": 2}])
def test_a_model_without_blocks_is_one(keys: dict[str, Any]) -> None:
    plan = plan_of(**keys)
    loss, matmuls = run_ranks(plan.world_size, without_blocks, plan)[0]
    again = plan.model_copy(update={"recompute": "full"})
    assert run_ranks(plan.world_size, without_blocks, again)[0] == (loss, matmuls + 1)  # the last is unused


class InPlace(nn.Module):
    """Blocks that change what a matrix multiplication gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def in_place(world: World, plan: Plan) -> float:
    model = parallelize(InPlace, plan, world, seed=1)
    step = Step(model, Supervised(square), AdamW(lr=1e-2), plan, world)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return step(StepBatch(0, (MicroBatch((x, x.flip(0)), 0, 8),))).loss


def test_a_kept_result_that_was_changed_in_place_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"changes the result of aten.addmm.default in place.*recompute_keep"
    ):
        run_ranks(1, in_place, plan_of(recompute="selective"))
    kept = run_ranks(1, in_place, Plan())[0]
    assert run_ranks(1, in_place, plan_of(recompute="selective", recompute_keep=["attention"]))[0] == kept


# Compiled


FEW, ONE = (UNTIED._replace(layers=layers) for layers in (2, 1))


class Compiled(NamedTuple):
    """A run, the graphs that were compiled for it, and how many of them were found on disk."""

    record: Record
    graphs: int
    found: int


def run_and_count(world: World, plan: Plan, dims: LlamaDims = FEW, cache: str = "") -> Compiled:
    if cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    counters.clear()
    record = run_plan(world, plan, "fp64", OPTIMIZER, 3, dims)
    return Compiled(
        record, counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"]
    )


fp64_is_compiled = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 compiles attention's backward in fp64 with types that it refuses",
)


@fp64_is_compiled
def test_compiled_blocks_compute_the_same() -> None:
    right = run_ranks(1, run_plan, plan_of(), "fp64", OPTIMIZER, 3, FEW)[0]
    plan = plan_of(compile=True, recompute="selective", recompute_every=2, tensor=2)
    for record, graphs, _ in run_ranks(plan.world_size, run_and_count, plan, timeout=300):
        assert graphs == 2  # one for equal blocks, of which there are two kinds; collectives are inside
        # angles' sines are of fp32, and the compiler's are other ones: 1e-7 of what positions add to scores of about 1e-4
        assert record.losses == pytest.approx(right.losses, rel=1e-10)
        assert record.norms == pytest.approx(right.norms, rel=1e-9)


@fp64_is_compiled
def test_what_was_compiled_is_found_again_by_a_later_process(tmp_path: Path) -> None:
    right = run_ranks(1, run_plan, plan_of(), "fp64", OPTIMIZER, 3, ONE)[0]
    plan = plan_of(compile="model", recompute="full")
    first, second = (run_ranks(1, run_and_count, plan, ONE, str(tmp_path), timeout=300)[0] for _ in range(2))
    assert (first.graphs, first.found) == (1, 0)
    assert (second.graphs, second.found) == (1, 1)
    assert second.record.losses == first.record.losses == pytest.approx(right.losses, rel=1e-10)
