"""The plan that is chosen uses every device, fits the memory it was chosen for, and is the simplest that does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shoal.check import check
from shoal.cluster import DEVICES, GIB, Cluster
from shoal.job import Job, Model, Train
from shoal.plan import MOST_RECORDED, Plan
from shoal.planner.choose import Workload, choose_degrees, choose_plan, with_graphs

GPUS = [kind for kind, device in DEVICES.items() if device.type == "cuda"]


def choose(cluster: str, parameters: float, *, batch: int = 512, activations: int = 0) -> Plan:
    work = Workload(int(parameters), activations)
    return choose_plan(Train(global_batch=batch, precision="bf16"), work, Cluster.parse(cluster))


def state_bytes(plan: Plan, parameters: float) -> float:
    """fp32 weights, gradients and two moments of AdamW by ZeRO stage (Rajbhandari et al., figure 1), a bf16 copy."""
    cut = plan.shard
    return (
        parameters
        * {
            0: 4 + 4 + 8 + 2,
            1: 4 / cut + 4 + 8 / cut + 2,
            2: (4 + 4 + 8) / cut + 2,
            3: (4 + 4 + 8) / cut,
        }[plan.zero_stage]
    )


@given(
    st.sampled_from(GPUS),
    st.integers(1, 64),
    st.integers(1, 16),
    st.floats(1e6, 5e11),
    st.integers(1, 32),
    st.integers(0, 10**11),
)
@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
def test_every_device_is_used_and_the_job_runs_under_the_plan(
    kind: str, nodes: int, per_node: int, parameters: float, local: int, activations: int
) -> None:
    cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=DEVICES[kind])
    train = Train(global_batch=local * cluster.num_devices)
    plan = choose_plan(train, Workload(int(parameters), activations), cluster)
    check(Job(model=Model(family="mine:build"), train=train), plan, cluster)


@given(st.sampled_from(GPUS), st.integers(1, 64), st.floats(1e6, 1e12))
@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
def test_state_takes_less_than_half_of_memory_unless_nothing_would(
    kind: str, nodes: int, parameters: float
) -> None:
    plan = choose(f"{nodes}x8 {kind}", parameters, batch=8 * nodes)
    memory = DEVICES[kind].memory_bytes
    assert memory
    if state_bytes(plan, parameters) > memory / 2:
        assert plan == Plan(shard=8 * nodes, zero=3, micro_batch=plan.micro_batch), "the most that there is"


def test_parameters_are_freed_between_uses_where_one_samples_activations_need_the_room() -> None:
    """8B at 8,192 tokens: about 16 + 16 GB of states under ZeRO-2, and 64 GB of activations by the estimate."""
    train = Train(global_batch=8, precision="bf16")
    on = [
        choose_plan(train, Workload(8_000_000_000, 64 * 10**9), Cluster.parse(f"8 {kind}"))
        for kind in ("h100", "h200")
    ]
    assert [plan.zero_stage for plan in on] == [3, 2]


def test_a_micro_batch_that_is_said_and_blocks_that_are_not_compiled_need_more_room() -> None:
    """Two samples of 8B on 2 H200s: `shoal plan` has 137 GiB under ZeRO-2 and 125 under ZeRO-3."""
    train, work = Train(global_batch=4, precision="bf16"), Workload(8_030_000_000, 64 * 10**9)
    two = choose_plan(train, work, Cluster.parse("2 h200"), said=Plan(micro_batch=2))
    eager = choose_plan(train, work, Cluster.parse("2 h200"), said=Plan(compile=False))
    assert (two.zero_stage, two.micro_batch, eager.zero_stage) == (3, 2, 3)


@pytest.mark.parametrize(("cluster", "stage"), [("2 h200", 2), ("2 b200", 2), ("2 h100", 3), ("4 h100", 3)])
def test_parameters_stay_gathered_where_all_that_there_will_be_is_known_to_fit(
    cluster: str, stage: int
) -> None:
    """On 2 H200s an 8B step takes 775 ms so, and 785 when parameters are freed (benchmarks/notes.md)."""
    train = Train(global_batch=2, precision="bf16")
    plan = choose_plan(
        train.model_copy(update={"global_batch": int(cluster[0])}),
        Workload(8_030_000_000, 64 * 10**9),
        Cluster.parse(cluster),
    )
    assert plan.zero_stage == stage


@pytest.mark.parametrize(
    ("cluster", "parameters", "expected"),
    [
        ("1 h100", 1e9, "one device"),
        ("8 h100", 1e8, "replicate 8"),
        ("8 h100", 1e9, "shard 8 (ZeRO-2)"),
        ("2 cpu", 1e12, "replicate 2"),  # memory is not known, so that it is not the reason
        ("8 h100", 8e9, "shard 8 (ZeRO-2)"),
        ("4x8 h100", 8e9, "replicate 4 x shard 8 (ZeRO-2)"),
        ("8 h100", 15e9, "shard 8 (ZeRO-3)"),
        ("64x8 h100", 70e9, "shard 512 (ZeRO-3)"),
    ],
)
def test_the_simplest_that_fits_is_taken(cluster: str, parameters: float, expected: str) -> None:
    plan = choose(cluster, parameters)
    assert plan.model_copy(update={"micro_batch": None}).describe() == expected


@pytest.mark.parametrize(
    ("cluster", "parameters", "keys", "expected"),
    [
        ("8 h100", 4e8, {"replicate": 8}, "model"),
        ("1 h100", 4e8, {"cuda_graphs": False}, "model"),
        ("8 h100", 6e8, {"replicate": 8}, None),  # steps do not wait for the host
        ("8 cpu", 4e8, {"replicate": 8}, None),
        ("8 h100", 4e8, {"shard": 8}, None),  # something happens between blocks
        ("8 h100", 4e8, {"replicate": 8, "compile": True}, True),
        ("8 h100", 4e8, {"replicate": 8, "compile": False}, False),
        ("8 h100", 4e8, {"replicate": 8, "offload": ["activations"]}, None),
    ],
)
def test_steps_that_would_wait_for_the_host_are_one_graph_unless_compile_is_said(
    cluster: str, parameters: float, keys: dict[str, Any], expected: bool | str | None
) -> None:
    work = Workload(int(parameters), 0, steady=True)
    plan = with_graphs(Plan.model_validate(keys), work, Cluster.parse(cluster), 16)
    assert plan.compile == expected
    assert with_graphs(
        Plan.model_validate(keys), work._replace(steady=False), Cluster.parse(cluster), 16
    ) == (Plan.model_validate(keys))


@pytest.mark.parametrize(
    ("cluster", "parameters", "keys", "expected"),
    [
        ("1 h100", 1.2e9, {}, True),
        ("8 h100", 4e8, {"shard": 8, "zero": 2}, True),
        ("8 h100", 4e8, {"shard": 8, "zero": 3, "compile": False}, True),
        ("8 h100", 4e8, {"shard": 8, "cuda_graphs": False}, False),
        ("8 h100", 8e9, {"shard": 8}, None),  # the host is ahead of the device
        ("8 h100", 4e8, {"replicate": 8}, None),
        ("8 h100", 4e8, {"tensor": 8}, None),
        ("2x8 h100", 4e8, {"shard": 16}, None),  # not measured
        ("1 h100", 4e8, {"recompute": "full"}, None),
        ("1 h100", 4e8, {"offload": ["optimizer"]}, None),
        ("1 cpu", 4e8, {}, None),
        ("8 mi300x", 4e8, {"shard": 8}, None),
    ],
)
def test_steps_that_would_wait_for_the_host_are_recorded(
    cluster: str, parameters: float, keys: dict[str, Any], expected: bool | None
) -> None:
    work = Workload(int(parameters), 0, steady=True)
    assert with_graphs(Plan.model_validate(keys), work, Cluster.parse(cluster), 16).cuda_graphs == expected


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("1 h100", "one device, CUDA graphs"),
        ("8 h100", "shard 8 (ZeRO-2), CUDA graphs"),
        ("2x8 h100", "replicate 16, compiled as a whole"),
    ],
)
def test_small_models_that_can_be_recorded_are_cut_too(cluster: str, expected: str) -> None:
    train = Train(global_batch=16, precision="bf16")
    plan = choose_plan(train, Workload(433_000_000, 0, steady=True), Cluster.parse(cluster))
    assert plan.model_copy(update={"micro_batch": None}).describe() == expected


@pytest.mark.parametrize("cluster", ["1 h100", "8 h100", "4x8 h100"])
def test_a_larger_model_is_never_cut_less(cluster: str) -> None:
    cuts = [(plan.zero_stage, plan.shard) for plan in (choose(cluster, 10**power) for power in range(6, 13))]
    assert cuts == sorted(cuts)


def test_the_micro_batch_is_the_largest_divisor_whose_activations_take_a_third_of_memory() -> None:
    per_sample = (
        2 * GIB
    )  # 80 / 3 = 26.7 GiB: 13 samples would fit, of 24 a rank the largest divisor below is 12
    assert choose("8 h100", 1e6, batch=24 * 8, activations=per_sample).micro_batch == 12
    assert choose("8 h100", 1e6, batch=24 * 8, activations=0).micro_batch == 24
    assert choose("8 h100", 1e6, batch=24 * 8, activations=1000 * GIB).micro_batch == 1


@pytest.mark.parametrize(("batch", "works"), [(30, [24, 32]), (5, [8]), (65, [64, 72])])
def test_a_batch_that_cannot_be_dealt_out_names_the_nearest_that_can(batch: int, works: list[int]) -> None:
    with pytest.raises(ValueError, match=f"train.global_batch = {batch} .* 8 devices; use ") as caught:
        choose("8 h100", 1e6, batch=batch)
    for size in works:
        assert str(size) in str(caught.value)
        choose("8 h100", 1e6, batch=size)


@pytest.mark.parametrize(
    ("said", "batch"),
    [
        (Plan(recompute="full"), 16),
        (Plan(offload=("optimizer",)), 16),
        (Plan(cuda_graphs=False), 16),
        (Plan(micro_batch=1), 8 * (MOST_RECORDED + 1)),
    ],
)
def test_small_models_whose_parts_cannot_be_recorded_are_copied(said: Plan, batch: int) -> None:
    train, work = Train(global_batch=batch, precision="bf16"), Workload(433_000_000, 0, steady=True)
    chosen = choose_degrees(train, work, Cluster.parse("8 h100"), said=said)
    assert chosen.replicate == 8
    merged = Plan.model_validate(chosen.model_dump() | said.model_dump(include=said.model_fields_set))
    plan = with_graphs(merged, work, Cluster.parse("8 h100"), batch)
    assert not plan.cuda_graphs and plan.compile == "model"
