"""What is in host memory between uses changes no number, and what a block keeps is where it should be."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal.parallel.offload
import shoal.train.streamed
from shoal.parallel.apply import parallelize
from shoal.parallel.offload import offload_activations
from shoal.plan import Plan
from shoal.train.evaluate import evaluate
from shoal.train.objective import NextToken
from shoal.train.step import Step
from shoal.world import World
from tests.late import LateLane, copy_late
from tests.parallel.test_axes import by_hand, check, named, of_size
from tests.ranks import Outcome, run_all, run_ranks
from tests.train import moe_toy
from tests.train.toy import (
    BATCH,
    DEEP,
    LENGTH,
    OPTIMIZER,
    Record,
    build,
    global_batch,
    part_of,
    run_plan,
    whole_weights,
)

STEPS = 3
CPU = torch.device("cpu")
ALL = ["parameters", "optimizer", "activations"]
PLANS: list[dict[str, Any]] = [
    {"offload": ["optimizer"]},
    {"offload": ["activations"], "micro_batch": 4},
    {"offload": ["parameters"], "micro_batch": 4},
    {"offload": ALL, "recompute": "full"},
    {"offload": ALL, "recompute": "selective", "recompute_every": 2},
    {"offload": ["optimizer"], "replicate": 2},
    {"offload": ["activations"], "shard": 2, "zero": 2},
    {"offload": ["parameters"], "tensor": 2},
    {"offload": ALL, "replicate": 2, "micro_batch": 4},
    {"offload": ALL, "shard": 2},
    {"offload": ALL, "shard": 2, "zero": 1, "micro_batch": 4},
    {"offload": ALL, "shard": 2, "zero": 2, "recompute": "full", "micro_batch": 4},
    {"offload": ALL, "tensor": 2, "recompute": "full"},
    {"offload": ALL, "context": 2},
    {"offload": ALL, "pipeline": 2, "micro_batch": 4},
    {"offload": ALL, "pipeline": 2, "micro_batch": 4, "zero": 3},
    {"offload": ALL, "pipeline": 2, "micro_batch": 2, "schedule": "interleaved_1f1b"},
    {"offload": ALL, "pipeline": 2, "micro_batch": 2, "schedule": "interleaved_zero_bubble"},
]
EXPERTS: list[dict[str, Any]] = [
    {"offload": ALL, "shard": 2, "expert": 2, "micro_batch": 4},
    {"offload": ["activations"], "tensor": 2, "expert": 2, "recompute": "full"},
]


def make_toys_count() -> None:
    """The toy's tensors are small: move them all the same, in many buckets."""
    shoal.parallel.offload.KEPT_BYTES = 512
    shoal.train.streamed.BUCKET_BYTES = 20_000


def run_small(world: World, plan: Plan) -> Record:
    make_toys_count()
    return run_plan(world, plan, "fp64", OPTIMIZER, STEPS, DEEP)


@functools.cache
def trained(ranks: int) -> dict[str, Outcome]:
    return run_all(ranks, run_small, of_size(ranks, PLANS))


@pytest.mark.parametrize("keys", PLANS, ids=named)
def test_every_plan_trains_as_one_process_does(keys: dict[str, Any]) -> None:
    check(trained(Plan.model_validate(keys).world_size)[named(keys)].get(), by_hand(DEEP))


def run_experts(world: World, plans: list[dict[str, Any]]) -> list[moe_toy.Record]:
    make_toys_count()
    return [moe_toy.train(world, Plan.model_validate(keys)) for keys in plans]


def test_so_do_models_with_experts() -> None:
    right = moe_toy.train_by_hand()
    for records in run_ranks(2, run_experts, EXPERTS):
        for record in records:
            assert record.losses == pytest.approx(right.losses, rel=1e-12)
            assert record.norms == pytest.approx(right.norms, rel=1e-12)
            for name, weight in record.weights.items():
                torch.testing.assert_close(weight, right.weights[name], rtol=0, atol=1e-11, msg=name)


def run_twice(world: World, keys: dict[str, Any], offload: list[str], precision: Any) -> list[Record]:
    """Without offload and with it."""
    make_toys_count()
    plans = [Plan.model_validate(keys), Plan.model_validate({**keys, "offload": offload})]
    return [run_plan(world, plan, precision, OPTIMIZER, STEPS, DEEP) for plan in plans]


@pytest.mark.parametrize(
    ("keys", "offload", "precision"),
    [
        ({"micro_batch": 4}, ["optimizer", "activations"], "bf16"),
        ({"compile": True, "recompute": "selective"}, ["optimizer", "activations"], "fp32"),
        ({"shard": 2, "micro_batch": 4}, ALL, "bf16"),
        ({"shard": 2, "recompute": "full"}, ALL, "fp16"),
    ],
)
def test_where_the_kernels_are_the_same_so_is_every_bit(
    keys: dict[str, Any], offload: list[str], precision: str
) -> None:
    ranks = Plan.model_validate(keys).world_size
    for plain, offloaded in run_ranks(ranks, run_twice, keys, offload, precision, timeout=200):
        assert (offloaded.losses, offloaded.norms) == (plain.losses, plain.norms)
        assert all(torch.equal(weight, plain.weights[name]) for name, weight in offloaded.weights.items())


def run_overflow(world: World, offload: list[str]) -> tuple[list[bool], list[float], dict[str, Tensor]]:
    """fp16 with a loss scale that is too large at first."""
    make_toys_count()
    plan = Plan.model_validate({"offload": offload, "shard": world.size, "micro_batch": 4})
    model = parallelize(functools.partial(build, DEEP), plan, world, precision="fp16", seed=7)
    step = Step(
        model,
        NextToken(),
        OPTIMIZER,
        plan,
        world,
        precision="fp16",
        total_steps=6,
        usual_weight=BATCH * LENGTH / 2,
        scale=(2.0**24, 100),
    )
    results = [step(part_of(global_batch(index), index, plan, world.rank)) for index in range(6)]
    held_out = [part_of(global_batch(9), 9, plan, world.rank)]
    loss = evaluate(model, NextToken(), held_out, world).loss
    return (
        [result.skipped for result in results],
        [result.loss for result in results] + [loss],
        whole_weights(model),
    )


def test_a_step_that_overflows_is_left_out_there_too() -> None:
    plain = run_ranks(2, run_overflow, [])
    offloaded = run_ranks(2, run_overflow, ALL)
    assert plain[0][0][0] and not plain[0][0][-1]  # skipped at first, and not at last
    for (skipped, losses, weights), right in zip(offloaded, plain, strict=True):
        assert (skipped, losses) == right[:2]
        assert all(torch.equal(weight, right[2][name]) for name, weight in weights.items())


class Block(nn.Module):
    """A block that shows what it makes."""

    def __init__(self, width: int, made: list[weakref.ref[torch.UntypedStorage]]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(width, width), made

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = self.linear(x).transpose(0, 1)
        self.made.append(weakref.ref(hidden.untyped_storage()))
        return x + (hidden.sin() * hidden).transpose(0, 1) * table


def stack(count: int = 5, width: int = 8) -> tuple[list[Block], list[weakref.ref[torch.UntypedStorage]]]:
    torch.manual_seed(0)
    made: list[weakref.ref[torch.UntypedStorage]] = []
    return [Block(width, made) for _ in range(count)], made


def through(blocks: list[Block], x: Tensor, table: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, table)
    return x


def test_only_the_last_block_keeps_on_the_device_what_backward_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, _ = stack()
    x, table = torch.randn(4, 8), torch.randn(4, 8)
    through(blocks, x, table).sum().backward()
    right = [block.linear.weight.grad for block in blocks]
    blocks, _ = stack()
    calls: list[Any] = []
    begin = shoal.parallel.offload._Traffic.begin
    monkeypatch.setattr(
        shoal.parallel.offload._Traffic, "begin", lambda *args: calls.append(begin(*args)) or calls[-1]
    )
    offload_activations(blocks, CPU, kept_bytes=0)
    output = through(blocks, x, table)
    ranges = [list(call.ranges.values()) for call in calls]
    assert [len(found) for found in ranges] == [3] * 5  # x, hidden (saved twice, as views) and its sine
    assert [[r.source is None for r in found] for found in ranges] == [[True] * 3] * 4 + [[False] * 3]
    assert all(r.host is not None for found in ranges[:-1] for r in found)
    assert all(r.host is None for r in ranges[-1])  # it is needed at once, and never moved
    del ranges
    output.sum().backward()
    for block, gradient in zip(blocks, right, strict=True):
        assert torch.equal(block.linear.weight.grad, gradient)  # pyrefly: ignore[bad-argument-type]
    assert [len(call.ranges) for call in calls] == [0] * 5  # nothing is held after backward


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_still_on_its_way_is_waited_for(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(blocks: list[Block]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        table = torch.randn(4, 8, generator=generator)
        inputs = [torch.randn(4, 8, generator=generator).requires_grad_() for _ in range(4)]
        outputs = [through(blocks, x * 1, table).sum() for x in inputs[:2]]
        for x in inputs[2:]:  # as a pipeline does: one forward, one backward, oldest first
            outputs.pop(0).backward()
            outputs.append(through(blocks, x * 1, table).sum())
        for output in outputs:
            output.backward()
        found = [x.grad for x in inputs] + [block.linear.weight.grad for block in blocks]
        return [gradient for gradient in found if gradient is not None]

    right = gradients(stack()[0])
    copy_late(monkeypatch)
    blocks, _ = stack()
    for block in blocks if recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    offload_activations(blocks, CPU, kept_bytes=0)
    for found, expected in zip(gradients(blocks), right, strict=True):
        assert torch.equal(found, expected)


def test_a_block_is_fetched_while_the_one_after_it_runs_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    begin = shoal.parallel.offload._Traffic.begin
    monkeypatch.setattr(
        shoal.parallel.offload._Traffic, "begin", lambda *args: calls.append(begin(*args)) or calls[-1]
    )
    blocks, _ = stack()
    offload_activations(blocks, CPU, kept_bytes=0)
    x, table = torch.randn(4, 8, requires_grad=True) * 1, torch.randn(4, 8)
    fetched: dict[int, list[bool]] = {}

    def look(number: int, gradient: Tensor) -> None:
        """Backward comes to a block: what of it is on the device, or on its way there?"""
        fetched[number] = [
            [found.source is None and found.back is None for found in call.ranges.values()].count(True) == 0
            for call in calls
        ]

    for number, block in enumerate(blocks):
        x = block(x, table)
        x.register_hook(functools.partial(look, number))
    x.sum().backward()
    here = {number: [i for i, done in enumerate(found) if done] for number, found in fetched.items()}
    # the last never left; each other one is asked for when the one after it begins, and no earlier
    assert here == {4: [4], 3: [3, 4], 2: [2, 3, 4], 1: [1, 2, 3, 4], 0: [0, 1, 2, 3, 4]}


def test_what_was_fetched_in_vain_has_come_before_its_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes: list[LateLane] = []
    copy_late(monkeypatch)
    monkeypatch.setattr(
        shoal.parallel.offload, "Lane", lambda device: lanes.append(LateLane(device)) or lanes[-1]
    )
    blocks, _ = stack()
    offload_activations(blocks, CPU, kept_bytes=0)
    x, table = torch.randn(4, 8, requires_grad=True) * 1, torch.randn(4, 8)
    third = through(blocks[:3], x, table)
    torch.autograd.grad(
        through(blocks[3:], third, table).sum(), third
    )  # stops before the third, which was fetched
    coming = lanes[1]
    assert coming.made < len(coming.asked)
    through(blocks[:1], x, table)
    assert coming.made == len(coming.asked)


class Slope(nn.Module):
    """A block that takes a gradient through the one before it, in its forward."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.sum(), table, retain_graph=True)
        return x * slope


def test_a_backward_that_began_before_its_block_left_waits_for_it_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gradients(blocks: list[Block], late: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, table = (torch.randn(4, 8, generator=generator) for _ in range(2))
        modules: list[nn.Module] = [blocks[0], Slope()]
        if late:
            offload_activations(modules, CPU, kept_bytes=0)
        x.requires_grad_(), table.requires_grad_()
        output = modules[1](modules[0](x * 1, table * 1), table)
        return list(torch.autograd.grad(output.sum(), [x, table]))

    right = gradients(stack()[0], late=False)
    copy_late(monkeypatch)
    for found, expected in zip(gradients(stack()[0], late=True), right, strict=True):
        assert torch.equal(found, expected)


def kept_by(blocks: list[Block], kept_bytes: int, table: Tensor) -> set[int]:
    """Addresses of saved tensors that stay on the device."""
    traffic, kept = shoal.parallel.offload._Traffic(CPU, kept_bytes), set()
    for block in blocks:
        block.forward = shoal.parallel.offload._moving(block, traffic)
    pack = traffic.pack

    def watched(call: Any, tensor: Tensor) -> Any:
        packed = pack(call, tensor)
        if isinstance(packed, shoal.parallel.offload._Kept):
            kept.add(tensor.data_ptr())
        return packed

    traffic.pack = watched  # pyrefly: ignore[bad-assignment]
    through(blocks, torch.randn(4, 8, requires_grad=True) * 1, table)
    return kept


def test_parameters_and_shared_inputs_stay_and_so_do_small_tensors() -> None:
    table = torch.randn(4, 8)
    blocks, _ = stack(2)
    assert kept_by(blocks, 0, table) == {
        table.data_ptr(),
        *(block.linear.weight.data_ptr() for block in blocks),
    }
    blocks, _ = stack(2)
    assert len(kept_by(blocks, 4 * 8 * 4 + 1, table)) > 3  # everything


def test_with_recompute_a_blocks_input_is_all_that_moves() -> None:
    blocks, made = stack()
    x, table = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    through(blocks, x * 1, table).sum().backward()
    right, x.grad = x.grad, None
    blocks, made = stack()
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    offload_activations(blocks, CPU, kept_bytes=0)
    output = through(blocks, x * 1, table)
    gc.collect()
    assert all(storage() is None for storage in made)
    output.sum().backward()
    assert torch.equal(x.grad, right)  # pyrefly: ignore[bad-argument-type]


def test_a_backward_may_come_twice_or_not_at_all() -> None:
    blocks, _ = stack()
    offload_activations(blocks, CPU, kept_bytes=0)
    x, table = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    through(blocks, x * 1, table)  # dropped
    output = through(blocks, x * 1, table).sum()
    (first,) = torch.autograd.grad(output, x, retain_graph=True)
    through(blocks, x * 1, table)  # another in between
    (second,) = torch.autograd.grad(output, x)
    assert torch.equal(first, second)
    with torch.no_grad():
        assert not through(blocks, x, table).requires_grad


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid()
        return y.add_(1.0)  # the gradient of sigmoid needs y


def test_what_is_changed_in_place_is_still_an_error() -> None:
    for count in (1, 3):
        blocks = [InPlace() for _ in range(count)]
        offload_activations(blocks, CPU, kept_bytes=0)
        x = torch.randn(4, 8, requires_grad=True)
        for block in blocks:
            x = block(x)
        with pytest.raises(RuntimeError, match=r"shape \[32\].*changed in place"):
            x.sum().backward()
