"""What cannot run is refused before anything starts, and what is suggested instead does run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shoal.check import check
from shoal.cluster import Cluster
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


@pytest.mark.parametrize("preset", ["1m", "8b"])
def test_tensor_divides_the_heads(preset: str) -> None:
    text = refusal(job(preset=preset, heads=16, kv_heads=2), Plan(tensor=8))
    assert "plan.tensor = 8" in text and "model.kv_heads = 2" in text and "[1, 2]" in text
    assert "model.heads = 4" in refusal(job(preset="5m"), Plan(tensor=8))


def test_a_pipeline_has_no_more_stages_than_blocks() -> None:
    text = refusal(job(preset="5m"), Plan(pipeline=8))
    assert "plan.pipeline = 8" in text and "model.layers = 6" in text and "at most 6" in text


def test_context_divides_the_sequence() -> None:
    text = refusal(job(seq_len=100), Plan(context=8))
    assert "plan.context = 8" in text and "data.seq_len = 100" in text
    assert all(100 % degree == 0 for degree in numbers_after(text, "these do: ["))


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


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline", "expert"])
def test_an_axis_that_this_version_lacks_is_refused_even_where_it_would_fit(axis: str) -> None:
    ranks = 1 if axis == "expert" else 2
    text = refusal(job(), Plan.model_validate({axis: 2}), Cluster.parse(f"{ranks} h100"))
    assert f"plan.{axis} = 2" in text and "replicate and shard" in text
