"""What cannot run is refused before anything starts, and what is suggested instead does run."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import apply_overrides, parse
from shoal.job import Data, Job, Model, Train
from shoal.plan import Plan

EIGHT = Cluster.parse("8 h100")


def job(batch: int = 32, seq_len: int = 256, **model: int | str) -> Job:
    return Job(train=Train(global_batch=batch), data=Data(seq_len=seq_len), model=Model.model_validate(model))


def refusal(job_: Job, plan: Plan, cluster: Cluster = EIGHT) -> str:
    with pytest.raises(ValueError) as caught:
        check(job_, plan, cluster)
    return str(caught.value)


def numbers_after(text: str, words: str) -> list[int]:
    """The list of numbers that follows some words."""
    return [int(number) for number in re.findall(r"\d+", text.split(words)[1].split("]")[0])]


def test_a_plan_that_fits_passes() -> None:
    check(job(), Plan(replicate=2, shard=4, micro_batch=2), EIGHT)


@pytest.mark.parametrize(
    "plan", [Plan(shard=3), Plan(), Plan(replicate=3, shard=2), Plan(replicate=2, shard=16)]
)
def test_degrees_multiply_to_the_devices_and_the_suggestion_does(plan: Plan) -> None:
    text = refusal(job(), plan)
    assert f"{plan.world_size} ranks" in text and "8 devices (8 h100)" in text
    suggested = {name: int(degree) for name, degree in re.findall(r"plan\.(\w+)=(\d+)", text)}
    assert suggested and "plan=auto" in text
    check(job(), plan.model_copy(update=suggested), EIGHT)


@pytest.mark.parametrize("batch", [1, 7, 33, 100])
def test_a_global_batch_is_dealt_out_evenly_and_the_suggestions_are(batch: int) -> None:
    text = refusal(job(batch), Plan(shard=8))
    assert f"train.global_batch = {batch}" in text
    multiple = re.search(r"such as (\d+)", text)
    assert multiple
    check(job(int(multiple[1])), Plan(shard=8), EIGHT)
    for degree in numbers_after(text, "one of ["):
        check(job(batch), Plan(shard=degree), Cluster.parse(f"{degree} h100"))


@given(st.integers(1, 6), st.integers(2, 60))
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_micro_batches_that_are_suggested_fit(ranks: int, micro: int) -> None:
    cluster, local = Cluster.parse(f"{ranks} h100"), 24
    plan = Plan(replicate=ranks, micro_batch=micro)
    if local % micro == 0:
        return check(job(local * ranks), plan, cluster)
    text = refusal(job(local * ranks), plan, cluster)
    assert f"plan.micro_batch = {micro}" in text and "24 samples" in text
    for fits in numbers_after(text, "these do: ["):
        check(job(local * ranks), Plan(replicate=ranks, micro_batch=fits), cluster)
    return None


def test_tensor_divides_the_heads_and_the_vocabulary() -> None:
    assert "model.heads = 4" in refusal(job(preset="5m"), Plan(tensor=8))
    text = refusal(job(preset="8b", vocab=257), Plan(tensor=8))
    assert "model.vocab = 257" in text and "model.vocab=264" in text
    check(job(preset="8b", vocab=264), Plan(tensor=8), EIGHT)


def test_key_value_heads_are_cut_or_shared_whole() -> None:
    check(job(preset="8b", kv_heads=2), Plan(tensor=8), EIGHT)
    text = refusal(
        job(96, 60, dim=768, heads=12, kv_heads=4, vocab=60, ffn=60), Plan(tensor=6), Cluster.parse("6 h100")
    )
    assert "plan.tensor = 6 and model.kv_heads = 4" in text


def test_a_pipeline_has_no_more_stages_than_blocks() -> None:
    text = refusal(job(preset="5m"), Plan(pipeline=8, micro_batch=1))
    assert "plan.pipeline = 8" in text and "model.layers = 6" in text and "plan.pipeline=6 or fewer" in text
    text = refusal(job(preset="5m"), Plan(pipeline=4, schedule="zbv", micro_batch=1), Cluster.parse("4 h100"))
    assert "8 stages" in text and "plan.pipeline=3 or fewer, or plan.schedule=1f1b" in text


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"schedule": "zbv"},
    {"schedule": "dualpipev", "virtual_stages": 2},
    {"schedule": "interleaved_1f1b", "virtual_stages": 4},
    {"schedule": "looped_bfs"},
]


def _has_too_many_stages(keys: dict[str, Any], layers: int, pipeline: int) -> bool:
    return Plan.model_validate({"pipeline": pipeline, **keys, "micro_batch": 1}).stages > layers


@pytest.mark.parametrize(
    ("keys", "layers", "pipeline"),
    [case for case in product(SCHEDULES, (1, 2, 3, 6), (2, 4, 8)) if _has_too_many_stages(*case)],
)
def test_what_is_advised_in_place_of_too_many_stages_has_a_stage_for_each_rank_and_fits(
    keys: dict[str, Any], layers: int, pipeline: int
) -> None:
    plan = Plan.model_validate({"pipeline": pipeline, **keys, "micro_batch": 1})
    own = job(preset="5m", layers=layers, tied=False)  # V-shaped schedules want ends that are not tied
    advice = refusal(own, plan, Cluster.parse(f"{pipeline} h100")).rpartition("; use ")[2]
    for way in advice.replace(" and another axis", "").split(", or "):
        said = dict(re.findall(r"plan\.(\w+)=(\w+)", way))
        kept = {} if "without plan.virtual_stages" in way or said == {"pipeline": "1"} else keys
        table = {"pipeline": pipeline, "micro_batch": 1, **kept}
        changed = parse(
            apply_overrides({"plan": table}, [f"plan.{k}={v}" for k, v in said.items()]), "test"
        ).plan
        assert changed is not None
        check(own, changed, Cluster.parse(f"{changed.world_size} h100"))


@pytest.mark.parametrize("plan", [Plan(context=8), Plan(context=2, tensor=4), Plan(tensor=8)])
def test_the_cuts_divide_the_sequence(plan: Plan) -> None:
    text = refusal(job(seq_len=102, preset="8b"), plan)
    assert "data.seq_len" in text and "it is 102" in text
    for length in re.findall(r"such as (\d+) and (\d+)", text)[0]:
        check(job(seq_len=int(length), preset="8b"), plan, EIGHT)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pipeline=8),
        Plan(pipeline=8, schedule="dualpipev", micro_batch=4),
        Plan(pipeline=4, shard=2, schedule="interleaved_1f1b", micro_batch=1),
    ],
)
def test_a_schedule_has_the_micro_batches_that_it_needs(plan: Plan) -> None:
    batch = 44 if plan.shard > 1 else 32
    text = refusal(job(batch, preset="8b"), plan)
    assert "plan.schedule" in text
    size = re.search(r"plan\.micro_batch=(\d+) would do", text)
    assert size
    check(job(batch, preset="8b"), plan.model_copy(update={"micro_batch": int(size[1])}), EIGHT)


def test_what_a_pipeline_does_with_gradients_is_not_called_zero_2() -> None:
    with pytest.raises(ValueError, match="use zero = 1 or 3"):
        Plan(pipeline=2, shard=2, zero=2)
    with pytest.raises(ValueError, match="zero = 3 frees parameters between uses"):
        Plan(pipeline=2, shard=2, zero=3, schedule="zbv")
    assert Plan(pipeline=2, shard=2).zero_stage == 1


def test_an_unknown_preset_names_those_there_are() -> None:
    text = refusal(job(preset="6m"), Plan(shard=8))
    assert "model.preset = '6m'" in text and "5m" in text and "405b" in text


def test_heads_that_do_not_divide_the_width_name_some_that_do() -> None:
    text = refusal(job(preset="5m", heads=3), Plan(shard=8))
    assert "model.heads = 3" in text and "model.dim = 256" in text
    for heads in numbers_after(text, "such as ["):
        check(job(preset="5m", heads=heads), Plan(shard=8), EIGHT)


def test_a_model_of_ones_own_is_not_measured_by_our_dimensions() -> None:
    own = Job(train=Train(global_batch=8), model=Model(family="mine:build"))
    check(own, Plan(shard=8), EIGHT)


def test_experts_are_shared_by_a_degree_that_divides_them() -> None:
    moe = job(family="moe", preset="4x1m", vocab=512)
    text = refusal(moe, Plan(shard=8, expert=8))
    assert "plan.expert = 8" in text and "model.experts = 4" in text
    for degree in numbers_after(text, "these do: ["):
        check(moe, Plan(shard=8, expert=degree), EIGHT)


def test_a_model_without_experts_shares_none() -> None:
    text = refusal(job(), Plan(shard=8, expert=2))
    assert "plan.expert = 2" in text and "plan.expert=1" in text and "model.family=moe" in text


def test_tensor_divides_the_width_of_the_shared_experts_alone() -> None:
    check(job(family="moe", preset="8x7b", expert_ffn=33), Plan(tensor=8), EIGHT)
    text = refusal(job(family="moe", preset="8x7b", expert_ffn=33, shared_experts=2), Plan(tensor=8))
    assert "model.shared_experts x model.expert_ffn = 66" in text


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_tied_ends_are_not_on_one_rank(schedule: str) -> None:
    plan = Plan.model_validate({"pipeline": 2, "schedule": schedule, "micro_batch": 2})
    two = Cluster.parse("2 h100")
    assert "tied head and embedding" in refusal(job(preset="1m", tied=True), plan, two)
    check(job(preset="1m", tied=False), plan, two)


def test_degrees_of_tensor_that_are_suggested_divide_all_that_they_must() -> None:
    odd = job(dim=96, heads=6, kv_heads=6, layers=2, ffn=256, vocab=512)
    assert numbers_after(refusal(odd, Plan(tensor=3, shard=1), Cluster.parse("3 h100")), "these do: [") == [
        1,
        2,
    ]
