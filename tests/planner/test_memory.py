"""A peak is told by what it is for, adds up, and the verdict says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cluster import GIB, Cluster
from shoal.parallel.peers import ROOM
from shoal.plan import Plan
from shoal.planner.launch import Moment
from shoal.planner.memory import Category, Fit, Memory, Peak, category_of, judge, memory_of
from shoal.planner.simulate import simulate
from shoal.planner.trace import Storage, Trace
from tests.planner.real import DIMS, dense, work

PARAMETERS = sum(p.numel() for p in dense().parameters())
H100 = Cluster.parse("1 h100")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate(work(), Plan(compile=False), H100)


def test_parameters_and_the_optimizer_are_what_they_are(trace: Trace) -> None:
    found = memory_of(trace, Plan(), "cuda").peak.by_category
    rounded = 512 * (2 + 9 * DIMS.layers + 1)
    assert 4 * PARAMETERS <= found[Category.PARAMETERS] <= 4 * PARAMETERS + rounded
    assert 8 * PARAMETERS <= found[Category.OPTIMIZER] <= 8 * PARAMETERS + 3 * rounded


def test_categories_add_up_to_what_is_allocated(trace: Trace) -> None:
    memory = memory_of(trace, Plan(), "cuda")
    assert sum(memory.peak.by_category.values()) == memory.peak.allocated_bytes
    assert memory.peak.allocated_bytes == max(memory.phases.values()) <= memory.reserved_bytes


def test_gradients_are_told_where_they_are_the_most(trace: Trace) -> None:
    last = [i for i, moment in enumerate(trace.moments) if moment.phase == "backward"][-1]
    live: set[int] = set()
    for _, event in trace.memory(last + 1):
        live.add(event) if event >= 0 else live.discard(~event)
    gradients = sum(
        trace.storages[number].nbytes
        for number in live
        if category_of(trace.storages[number]) is Category.GRADIENTS
    )
    assert gradients == 4 * PARAMETERS


def test_sums_of_micro_batches_that_copies_have_not_summed_yet_are_gradients() -> None:
    plan = Plan(replicate=2, shard=2, zero=2, micro_batch=1, compile=False)
    hybrid = simulate(work(), plan, Cluster.parse("2x2 h100"))
    summed = [
        each
        for each in hybrid.storages
        if each.began.phase == "backward"
        and each.ended
        and each.ended.phase == "backward"
        and category_of(each) is Category.GRADIENTS
    ]
    assert summed and sum(each.nbytes for each in summed) >= 4 * PARAMETERS // 2


def test_a_gpus_peak_holds_a_workspace_and_a_cpus_does_not(trace: Trace) -> None:
    on_cpu = simulate(work(), Plan(), Cluster.parse("1 cpu"))
    assert Category.WORKSPACE in memory_of(trace, Plan(), "cuda").peak.by_category
    assert Category.WORKSPACE not in memory_of(on_cpu, Plan(), "cpu").peak.by_category


def test_a_recording_has_workspaces_and_segments_of_its_own(trace: Trace) -> None:
    """As on an H200: 64 MiB more are allocated, for the handles of forward and backward on the stream that is recorded."""
    launched, recorded = (memory_of(trace, Plan(cuda_graphs=flag), "cuda") for flag in (False, True))
    more = recorded.peak.allocated_bytes - launched.peak.allocated_bytes
    assert more == 2 * (32 << 20)
    of_kernels = (memory.peak.by_category[Category.WORKSPACE] for memory in (recorded, launched))
    assert next(of_kernels) - next(of_kernels) == more
    assert sum(recorded.peak.by_category.values()) == recorded.peak.allocated_bytes
    assert launched.reserved_bytes + more <= recorded.reserved_bytes
    on_cpu = memory_of(trace, Plan(cuda_graphs=True), "cpu")
    assert on_cpu.peak.allocated_bytes == memory_of(trace, Plan(), "cpu").peak.allocated_bytes


def test_recompute_holds_fewer_activations() -> None:
    whole, again = (
        memory_of(simulate(work(), plan, H100), plan, "cuda").peak.by_category[Category.ACTIVATIONS]
        for plan in (Plan(compile=False), Plan(compile=False, recompute="full"))
    )
    assert again < whole


def test_what_is_made_in_forward_and_freed_in_backward_is_an_activation() -> None:
    forward, backward = (Moment(0, phase, "") for phase in ("forward", "backward"))

    def made(began: Moment, ended: Moment, travels: bool = False) -> Category:
        return category_of(Storage(1, "cuda", 0, "", (), "", began, ended, travels=travels))

    assert made(forward, backward) is Category.ACTIVATIONS
    assert made(forward, forward) is Category.TEMPORARIES
    assert made(forward, forward, travels=True) is Category.COMMUNICATION
    assert made(backward, backward) is Category.TEMPORARIES


def memory(allocated: float, reserved: float, by: dict[Category, int]) -> Memory:
    storage = Storage(0, "cuda", 0, "", (), "", Moment(0, "forward", ""))
    peak = Peak(int(allocated * GIB), Moment(1, "backward", ""), by, [], None)  # pyrefly: ignore[bad-argument-type]
    assert storage.nbytes == 0
    return Memory(peak, int(reserved * GIB), 2 * GIB, 0, {})


@pytest.mark.parametrize(("reserved", "fit"), [(40, Fit.FITS), (77, Fit.TIGHT), (79, Fit.NOT)])
def test_the_verdict_is_of_the_device_and_not_of_tensors_alone(reserved: int, fit: Fit) -> None:
    found = judge(memory(30, reserved, {Category.ACTIVATIONS: 30 * GIB}), Plan(), H100)
    assert found.fit is fit and found.margin_bytes == (80 - 2 - reserved) * GIB
    assert bool(found.advice) == (fit is not Fit.FITS)


def test_advice_begins_with_what_takes_the_most() -> None:
    eight = Cluster.parse("8 h100")
    states = judge(memory(79, 79, {Category.OPTIMIZER: 70 * GIB}), Plan(replicate=8), eight).advice
    alone = judge(memory(79, 79, {Category.OPTIMIZER: 70 * GIB}), Plan(), H100).advice
    activations = judge(memory(79, 79, {Category.ACTIVATIONS: 70 * GIB}), Plan(), H100).advice
    assert (
        states[0].startswith("plan.replicate=1 plan.shard=8,") and "plan.tensor=2 plan.replicate=4" in states
    )
    assert alone[0].startswith("more devices") and not any("tensor" in each for each in alone)
    assert activations[0] == "a smaller plan.micro_batch"


def test_memory_that_the_allocator_wastes_is_named() -> None:
    found = judge(memory(60, 79, {Category.ACTIVATIONS: 60 * GIB}), Plan(), H100)
    assert any("expandable_segments:True" in advice and "19.0 GiB" in advice for advice in found.advice)


def test_advice_is_about_what_the_plan_does_not_do_yet() -> None:
    plan = Plan(shard=8, micro_batch=1, recompute="full", offload=("optimizer", "activations"), tensor=2)
    advice = judge(memory(79, 79, {Category.OPTIMIZER: 70 * GIB}), plan, H100).advice
    assert advice == ["more devices"]


def left_gathered(plan: Plan, cluster: str) -> tuple[int, int]:
    """Bytes of gathered parameters when the first update begins, and at the peak."""
    trace = simulate(work(), plan, Cluster.parse(cluster))
    first = next(i for i, moment in enumerate(trace.moments) if moment.phase == "update")
    live: set[int] = set()
    for _, event in trace.memory(first):
        live.add(event) if event >= 0 else live.discard(~event)
    left = [trace.storages[number] for number in live]
    peak = memory_of(trace, plan, "cuda").peak.by_category
    return sum(e.nbytes for e in left if category_of(e) is Category.GATHERED), peak[Category.GATHERED]


@pytest.mark.parametrize(
    ("keys", "rooms"),
    [({"zero": 3}, 2), ({"zero": 2}, 1), ({"zero": 3, "copy_engines": False}, 0)],
    ids=str,
)
def test_what_copy_engines_send_through_is_counted(keys: dict[str, Any], rooms: int) -> None:
    """ZeRO-2 keeps what is gathered in memory that others read, and has a room for gradients alone."""
    plan = Plan.model_validate({"shard": 2, "compile": False, **keys})
    found = memory_of(simulate(work(), plan, Cluster.parse("2 h100")), plan, "cuda").peak.by_category
    sent = found.get(Category.COMMUNICATION, 0)
    assert rooms * ROOM <= sent < rooms * ROOM + (8 << 20)


def test_gathered_parameters_that_other_ranks_read_stay() -> None:
    """Where GPUs reach each other's memory; else they go with the backward that needed them last."""
    plan = Plan(shard=2, zero=2, compile=False)
    stays, at_peak = left_gathered(plan, "1x2 h100")
    assert 2 * PARAMETERS <= stays <= 2 * PARAMETERS + 512 * 30
    assert stays <= at_peak <= stays + 512 * 30  # in the allocator's pieces
    for other, cluster in (
        (plan.model_copy(update={"copy_engines": False}), "1x2 h100"),
        (plan, "1x2 rtx4090"),
        (plan, "2x1 h100"),
        (plan.model_copy(update={"zero": 3}), "1x2 h100"),
    ):
        assert left_gathered(other, cluster)[0] == 0, (other, cluster)
