"""`Plan` gives every rank one place on the mesh and one part of the global batch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.plan import AXES, Plan, effective

degrees = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@given(degrees)
@hypothesis_settings(max_examples=50, deadline=None, derandomize=True)
def test_every_rank_has_one_place_and_rank_order_is_row_major(given_degrees: dict[str, int]) -> None:
    plan = Plan.model_validate(given_degrees)
    places = [plan.coordinates(rank) for rank in range(plan.world_size)]
    grid = itertools.product(*(range(given_degrees[axis]) for axis in AXES))  # the last axis runs fastest
    assert [tuple(place[axis] for axis in AXES) for place in places] == list(grid)
    assert plan.world_size == math.prod(given_degrees.values())


@given(degrees, st.integers(1, 3), st.integers(1, 3))
@hypothesis_settings(max_examples=50, deadline=None, derandomize=True)
def test_parts_of_the_global_batch_are_equal_and_cover_it(
    given_degrees: dict[str, int], count: int, size: int
) -> None:
    plan = Plan.model_validate({**given_degrees, "micro_batch": size})
    batch = plan.data_degree * count * size
    assert plan.micro_batches(batch) == (count, size)
    sharers = plan.world_size // plan.data_degree  # ranks that read the same samples
    parts = [plan.data_rank(rank) for rank in range(plan.world_size)]
    assert sorted(parts) == sorted(list(range(plan.data_degree)) * sharers)


@given(degrees)
@hypothesis_settings(max_examples=30, deadline=None, derandomize=True)
def test_ranks_that_share_a_model_share_the_samples(given_degrees: dict[str, int]) -> None:
    plan = Plan.model_validate(given_degrees)
    for rank in range(plan.world_size):
        place = plan.coordinates(rank)
        first = next(
            other
            for other in range(plan.world_size)
            if plan.coordinates(other) == {**place, "tensor": 0, "context": 0, "pipeline": 0}
        )
        assert plan.data_rank(rank) == plan.data_rank(first)


def test_without_a_micro_batch_a_rank_takes_its_whole_part_at_once() -> None:
    assert Plan(replicate=2, shard=2).micro_batches(32) == (1, 8)


@pytest.mark.parametrize(
    ("keys", "stage"),
    [
        ({}, 0),
        ({"shard": 2}, 3),
        ({"shard": 2, "zero": 1}, 1),
        ({"shard": 2, "zero": 2}, 2),
        ({"zero": 3}, 0),
    ],
)
def test_zero_is_3_unless_said_and_0_with_nothing_to_shard(keys: dict[str, Any], stage: int) -> None:
    assert Plan.model_validate(keys).zero_stage == stage


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"zero": 0, "shard": 2}, "zero = 0 cuts nothing, but shard = 2; use zero = 1, 2 or 3"),
        ({"zero": 4}, "0, 1, 2 or 3"),
        ({"tensor": 0}, "greater than or equal to 1"),
        ({"offload": ["gradients"]}, "'parameters', 'optimizer' or 'activations'"),
        ({"offload": ["optimizer", "optimizer"]}, "offload names optimizer twice"),
        ({"offload": ["activations"], "compile": "model"}, "move between its blocks; use compile = true"),
        ({"recompute": "half"}, "'none', 'full' or 'selective'"),
        ({"recompute_every": 2}, 'recompute_every = 2 but recompute = "none"'),
        ({"recompute": "full", "recompute_keep": ("matmul",)}, "leave it out"),
        ({"recompute": "selective", "recompute_keep": ("matmul", "every_second_matmul")}, "use one of them"),
        ({"recompute": "selective", "recompute_keep": ("matmul", "matmul")}, "names a kind twice"),
        ({"shard": 2, "compile": "model"}, "compile = true, or a plan with replicate alone"),
        ({"pipeline": 2, "schedule": "zbv", "compile": True}, "compile = false"),
        ({"context": 2, "recompute": "selective", "compile": True}, 'context_by = "all_to_all"'),
        ({"shard": 2, "expert": 2, "recompute": "selective", "compile": True}, 'recompute = "full"'),
        ({"replicas": 2}, "not permitted"),
        ({"shares": [2, 1]}, "of which nothing is said: say them, too"),
        (
            {"shard": 2, "tensor": 2, "shares": [2, 1, 1, 1]},
            "one whole number from 1 on for each of the 2 ranks",
        ),
        ({"replicate": 2, "shares": [2, 0]}, "one whole number from 1 on"),
        ({"replicate": 2, "shares": "2,some"}, "'some' is not a share; say such as 3, or 3x8"),
        ({"replicate": 2, "shares": "3x0"}, "'3x0' is not a share"),
        ({"replicate": 2, "shares": "x3,1"}, "'x3' is not a share"),
        (
            {"shard": 2, "schedule": "zbv"},
            "schedule = 'zbv' .* pipeline = 1; leave it out, or use pipeline = 2",
        ),
        ({"shard": 2, "virtual_stages": 2}, "virtual_stages = 2 .* pipeline = 1; leave it out"),
        ({"shard": 2, "context_by": "all_to_all"}, "context_by = 'all_to_all' .* context = 1; leave it out"),
        ({"replicate": 4, "zero": 2}, "zero = 2 cuts over .* or use shard = 4 in place of replicate"),
        ({"tensor": 4, "copy_engines": True}, "copy_engines = true .* leave it out, or use shard = 2"),
        ({"tensor": 4, "zero": 3}, "zero = 3 cuts over .* leave it out, or use shard = 2 or more"),
    ],
)
def test_an_impossible_plan_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named) as caught:
        Plan.model_validate(keys)
    assert len(caught.value.errors()) == 1


@pytest.mark.parametrize(
    "keys",
    [
        Plan(shard=2).model_dump(),  # a job file that a run wrote says everything
        {"schedule": "zbv", "context_by": "all_to_all", "zero": 2},  # for degrees that are not chosen yet
        {"replicate": 1, "zero": 2},
        {"replicate": 2, "zero": 0},
        {"tensor": 2, "zero": 1, "offload": ["parameters"]},
        {"shard": 2, "virtual_stages": 1},
    ],
)
def test_what_is_so_anyway_may_be_said(keys: dict[str, Any]) -> None:
    Plan.model_validate(keys)


def test_parts_kept_from_another_plan_are_left_out_where_they_have_no_effect() -> None:
    parts = {
        "schedule": "gpipe",
        "virtual_stages": 1,
        "context_by": "all_to_all",
        "zero": 1,
        "compile": False,
    }
    assert effective({"replicate": 2, **parts}) == {"replicate": 2, "compile": False}
    for degrees in ({"pipeline": 2, "context": 2}, {"pipeline": 2, "context": 2, "shard": 2}):
        assert effective(degrees | parts) == degrees | parts
    assert effective({"tensor": 2, "zero": 1, "offload": ("parameters",)})["zero"] == 1


@pytest.mark.parametrize(
    ("keys", "on_gpu", "on_cpu"),
    [
        ({}, "blocks", None),
        ({"compile": False}, None, None),
        ({"compile": True}, "blocks", "blocks"),
        ({"compile": "model"}, "model", "model"),
        ({"pipeline": 2, "schedule": "zbv"}, None, None),
        ({"context": 2, "recompute": "selective"}, None, None),
        ({"context": 2, "context_by": "all_to_all", "recompute": "selective"}, "blocks", None),
    ],
)
def test_blocks_are_compiled_on_gpus_where_the_schedule_allows_it(
    keys: dict[str, Any], on_gpu: str | None, on_cpu: str | None
) -> None:
    plan = Plan.model_validate(keys)
    assert (plan.compiles("cuda"), plan.compiles("cpu")) == (on_gpu, on_cpu)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, False),
        ({"micro_batch": 2, "recompute": "full"}, False),
        ({"shard": 1}, True),
        ({"expert": 1}, True),
    ],
)
def test_a_plan_says_degrees_when_one_is_given_even_if_it_is_1(keys: dict[str, Any], says: bool) -> None:
    assert Plan.model_validate(keys).says_degrees is says


def test_offload_is_a_list_of_kinds_or_words_with_commas() -> None:
    assert Plan.model_validate({"offload": ["optimizer"]}).offload == ("optimizer",)
    assert Plan.model_validate({"offload": "optimizer, activations"}).offload == ("optimizer", "activations")
    assert Plan.model_validate({"offload": "none"}).offload == ()
    plan = Plan(offload=("parameters",))
    assert plan.describe() == "one device, parameters in host memory"
    assert not plan.only_copies and plan.zero_stage == 3
    assert Plan(offload=("parameters",), zero=1).zero_stage == 1
    assert Plan(offload=("optimizer", "activations")).only_copies


def test_one_phrase_tells_all_that_differs_from_one_device() -> None:
    assert Plan().describe() == "one device"
    plan = Plan(replicate=2, shard=4, zero=2, micro_batch=8, recompute="full", compile=True)
    assert plan.describe() == "replicate 2 x shard 4 (ZeRO-2), micro-batch 8, recompute full, compiled"
    plan = Plan(recompute="selective", recompute_keep=("attention",), recompute_every=3, compile="model")
    assert plan.describe() == (
        "one device, recompute selective (keep attention) in every 3rd block, compiled as a whole"
    )


def test_the_expert_degree_divides_the_ranks_that_it_re_uses_and_needs_no_others() -> None:
    plan = Plan(shard=2, context=2, tensor=3, expert=6)
    assert (plan.world_size, plan.sharing) == (12, 12)
    assert plan.describe().endswith("experts over 6")
    with pytest.raises(ValidationError, match=r"expert = 4 .* = 6 .* one of \[1, 2, 3, 6\]"):
        Plan(replicate=4, shard=2, tensor=3, expert=4)


def test_every_key_says_what_it_means() -> None:
    for name, field in Plan.model_fields.items():
        assert len(field.description or "") > 10, name


def test_what_selective_recompute_keeps_may_be_words_with_commas() -> None:
    said = Plan.model_validate({"recompute": "selective", "recompute_keep": "attention, communication"})
    assert said.recompute_keep == ("attention", "communication")
    assert Plan.model_validate({"recompute": "selective", "recompute_keep": "none"}).recompute_keep == ()
