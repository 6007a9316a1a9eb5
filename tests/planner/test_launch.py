"""What an operator costs is read off its arguments: sizes of products, bytes that move, operations, who a collective is among."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shoal.cluster import Cluster
from shoal.plan import Plan
from shoal.planner.fusion import FUSED
from shoal.planner.launch import GROUPED, WIDENING, Cost, Dims, Heads, Launch, cost_of, on_lists, parts_of
from shoal.planner.simulate import simulate, simulated_world
from tests.planner.real import DIMS, balanced_moe, dense, work

aten: Any = torch.ops.aten


def cost(func: Any, *args: Any) -> Cost | None:
    out = func(*args)
    return cost_of(func, args, {}, [out] if isinstance(out, torch.Tensor) else list(out))


def test_a_product_has_its_sizes_and_operations() -> None:
    found = cost(aten.mm.default, torch.zeros(8, 16), torch.zeros(16, 32))
    assert found == Cost(
        "matmul", 4 * (8 * 16 + 16 * 32 + 8 * 32), 2 * 8 * 16 * 32, "float32", Dims(8, 32, 16)
    )


@pytest.mark.parametrize(
    ("func", "args", "dims"),
    [
        (aten.addmm.default, (torch.zeros(32), torch.zeros(8, 16), torch.zeros(16, 32)), Dims(8, 32, 16)),
        (aten.bmm.default, (torch.zeros(3, 8, 16), torch.zeros(3, 16, 32)), Dims(8, 32, 16, 3)),
    ],
    ids=["addmm", "bmm"],
)
def test_other_products_too(func: Any, args: Any, dims: Dims) -> None:
    found = cost(func, *args)
    assert found is not None and found.dims == dims


def test_what_only_looks_at_memory_costs_nothing() -> None:
    x = torch.zeros(4, 4)
    assert cost(aten.view.default, x, [16]) is None
    assert cost(aten.t.default, x) is None
    assert cost(aten.empty.memory_format, [4]) is None


def test_bytes_are_those_read_and_written() -> None:
    x, y = torch.zeros(100), torch.zeros(100)
    assert [found.nbytes for found in (cost(aten.add.Tensor, x, y),) if found] == [1200]
    assert [found.nbytes for found in (cost(aten.add_.Tensor, x, y),) if found] == [1200]
    assert [found.nbytes for found in (cost(aten.copy_.default, x, y),) if found] == [800]


def test_of_a_table_rows_are_read_that_are_asked_for() -> None:
    found = cost(aten.embedding.default, torch.zeros(1000, 8), torch.zeros(4, dtype=torch.long))
    assert found is not None and found.nbytes == 2 * 4 * 8 * 4 + 4 * 8


def test_causal_attention_is_half_and_its_gradient_five_halves() -> None:
    with simulated_world(Cluster.parse("1 h100"), 0, 1) as world:
        q = torch.zeros(2, 4, 64, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        found = [launch for launch in world.tape.trace.launches() if launch.kind == "attention"]
    full = 2 * 4 * 64 * 64 * 32
    assert [launch.flops for launch in found] == [2 * full, 5 * full]
    assert found[0].dims == Heads(2, 4, 4, 64, 64, 32, causal=True, backward=False)


def test_an_optimizers_launch_has_a_part_for_each_parameter() -> None:
    ours, theirs = [torch.zeros(10), torch.zeros(20)], [torch.zeros(10), torch.zeros(20)]
    assert on_lists(aten._foreach_add_.List, (ours, theirs)) and not on_lists(
        aten.add_.Tensor, (ours[0], theirs[0])
    )
    parts = list(parts_of(aten._foreach_add_.List, (ours, theirs), []))
    assert [(first is mine, cost.nbytes) for mine, (first, cost) in zip(ours, parts, strict=True)] == [
        (True, 120),
        (True, 240),
    ]


def collectives(calls: Any) -> list[Launch]:
    with simulated_world(Cluster.parse("2x2 h100"), 1, 4) as world:
        calls(world)
        return [launch for launch in world.tape.trace.launches() if launch.kind != "move"]


def test_a_collective_that_is_waited_for_is_on_the_callers_stream() -> None:
    def calls(_: Any) -> None:
        part, whole = torch.zeros(4, device="cuda"), torch.zeros(16, device="cuda")
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)

    found = collectives(calls)
    assert [(launch.operator, launch.nbytes, launch.ranks, launch.stream) for launch in found] == [
        ("all_gather", 64, (0, 1, 2, 3), 0),
        ("reduce_scatter", 64, (0, 1, 2, 3), 0),
    ]


def test_an_asynchronous_one_begins_after_what_came_before_and_is_waited_for() -> None:
    def calls(world: Any) -> None:
        mesh = world.mesh(Plan(replicate=2, shard=2))
        work = dist.all_reduce(torch.zeros(4, device="cuda"), group=mesh["shard"].get_group(), async_op=True)
        assert work is not None
        work.wait()

    record, before, reduce, after = collectives(calls)
    assert (record.kind, before.kind, before.on) == ("record", "wait", record)
    assert (reduce.operator, reduce.ranks, reduce.stream) == ("all_reduce", (0, 1), before.stream)
    assert (after.kind, after.stream, after.on) == ("wait", 0, reduce)


def test_a_message_names_the_other_rank() -> None:
    def calls(_: Any) -> None:
        dist.send(torch.zeros(4, device="cuda"), 2)

    found = [launch for launch in collectives(calls) if launch.kind == "send"]
    assert [(launch.ranks, launch.nbytes) for launch in found] == [((2,), 16)]


def test_streams_wait_for_what_was_recorded() -> None:
    def calls(_: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.zeros(4, device="cuda")
        event = side.record_event()
        torch.cuda.current_stream().wait_event(event)
        event.synchronize()

    found = collectives(calls)
    assert [(launch.kind, launch.stream) for launch in found] == [
        ("record", 0),
        ("wait", 1),
        ("record", 1),
        ("wait", 0),
        ("sync", 0),
    ]
    assert found[1].on is found[0] and found[3].on is found[4].on is found[2]


def test_a_copy_to_the_host_is_a_transfer() -> None:
    with simulated_world(Cluster.parse("1 h100"), 0, 1) as world:
        there = torch.zeros(256, device="cuda")
        here = torch.empty(256)
        here.copy_(there)
        there.copy_(here)
        found = [launch for launch in world.tape.trace.launches() if launch.kind == "transfer"]
    assert [launch.nbytes for launch in found] == [1024, 1024]


def test_a_copy_that_widens_takes_longer_than_its_bytes() -> None:
    with simulated_world(Cluster.parse("1 h100"), 0, 1) as world:
        half = torch.zeros(256, device="cuda", dtype=torch.bfloat16)
        half.float().bfloat16()
        found = [
            launch for launch in world.tape.trace.launches() if launch.operator == "aten._to_copy.default"
        ]
    assert [launch.times for launch in found] == [WIDENING, 1.0]


@pytest.mark.parametrize(
    ("keys", "operators"),
    [
        ({"zero": 2}, ("peer_share", "peer_exchange")),
        ({"zero": 3}, ("peer_gather", "peer_exchange")),
        ({"zero": 2, "copy_engines": False}, ("all_gather", "all_to_all")),
    ],
    ids=str,
)
def test_a_unit_is_gathered_by_one_launch_and_its_gradients_are_exchanged_by_one(
    keys: dict[str, Any], operators: tuple[str, str]
) -> None:
    """Of two blocks and what is outside of them, in two steps; 16 bits a parameter, a rank's own part included."""
    plan = Plan.model_validate({"shard": 2, **keys})
    trace = simulate(work()._replace(precision="bf16"), plan, Cluster.parse("2 h100"))
    sent = [event for event in trace.events if isinstance(event, Launch) and event.kind == "collective"]
    parameters = sum(parameter.numel() for parameter in dense().parameters())
    for operator, forward_too in zip(operators, (True, False), strict=True):
        sizes = [launch.nbytes for launch in sent if launch.operator == operator]
        again = 2 if forward_too and plan.zero_stage == 3 else 0  # blocks are gathered for backward once more
        assert len(sizes) == 2 * (3 + again)
        assert again or sum(sizes) == 2 * 2 * parameters
    assert not [launch for launch in sent if launch.operator == "reduce_scatter"]


def test_between_hosts_gradients_are_reduced_in_fp32() -> None:
    trace = simulate(work()._replace(precision="bf16"), Plan(shard=2, zero=2), Cluster.parse("2x1 h100"))
    sent = [event for event in trace.events if isinstance(event, Launch) and event.kind == "collective"]
    assert {launch.operator for launch in sent} >= {"all_gather", "reduce_scatter"}
    assert not [launch for launch in sent if launch.operator == "all_to_all"]


def test_the_host_waits_for_numbers_of_rows_once_in_each_block_with_experts() -> None:
    for expert in (1, 2):
        plan = Plan(shard=2, expert=expert, compile=False)
        trace = simulate(work(balanced_moe), plan, Cluster.parse("1x2 h100"))
        waits = [launch for launch in trace.launches() if launch.kind == "sync" and launch.moment.step == 1]
        assert len(waits) == (DIMS.layers if expert > 1 else 0)
        assert all(launch.moment.phase == "forward" for launch in waits)


def test_on_gpus_kernels_of_compiled_blocks_take_longer_than_operators_of_as_many_bytes() -> None:
    trace = simulate(work()._replace(precision="bf16"), Plan(shard=2, compile=True), Cluster.parse("2 h100"))
    moves = [launch for launch in trace.launches() if launch.kind == "move"]
    assert {launch.times for launch in moves if launch.compiled} == {FUSED}
    assert {launch.times for launch in moves if not launch.compiled} <= {1.0, WIDENING}


def test_products_of_groups_are_known_to_be_slower() -> None:
    trace = simulate(
        work(balanced_moe)._replace(precision="bf16"), Plan(shard=2, compile=False), Cluster.parse("2 h100")
    )
    products = [launch for launch in trace.launches() if launch.kind == "matmul"]
    groups = [launch for launch in products if "grouped" in launch.operator]
    assert groups and {launch.times for launch in groups} == {GROUPED}
    assert {launch.times for launch in products if launch not in groups} == {1.0}
