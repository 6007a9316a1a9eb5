"""Plans that a search begins with: every one fits the job's sizes, those that were said are kept, guesses order them sensibly."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import Settings, parse
from shoal.plan import Plan
from shoal.planner.candidates import Base, candidates, guess, with_few_launches
from shoal.planner.cost import costs_of

BASE_8B = Base(8_030_000_000, 218_000_000, 32, 1.0, 36 * 2**30, 8192 * 4096 * 2)


def job(**tables: Any) -> Settings:
    base: dict[str, Any] = {
        "model": {"preset": "8b"},
        "data": {"source": "synthetic", "vocab": 128256, "seq_len": 8192},
        "train": {"global_batch": 32, "precision": "bf16"},
    }
    return parse({name: {**base.get(name, {}), **tables.get(name, {})} for name in {*base, *tables}}, "test")


def plans(on: str, **tables: Any) -> list[Plan]:
    return list(candidates(job(**tables), Cluster.parse(on)))


@pytest.mark.parametrize("on", ["1 h100", "8 h100", "2x8 h100", "6 a100"])
def test_every_plan_fits_the_job_and_the_cluster(on: str) -> None:
    tables = {"train": {"global_batch": 48}}
    found = plans(on, **tables)
    assert found
    for plan in found:
        check(job(**tables).job, plan, Cluster.parse(on))


def test_all_kinds_are_there() -> None:
    found = plans("2x8 h100")
    assert any(plan.replicate == 16 for plan in found)
    assert any(plan.shard == 16 and plan.zero == 3 for plan in found)
    assert any(plan.replicate == 2 and plan.shard == 8 for plan in found)
    assert any(plan.tensor == 8 for plan in found) and not any(plan.tensor > 8 for plan in found)
    assert any(plan.pipeline == 2 and plan.shard == 8 for plan in found)
    assert any(plan.recompute == "full" for plan in found)


def test_long_sequences_may_be_cut_and_short_ones_are_not() -> None:
    assert all(plan.context == 1 for plan in plans("8 h100"))
    assert any(plan.context == 8 for plan in plans("8 h100", data={"seq_len": 131072}))


def test_experts_are_shared_where_there_are_some() -> None:
    moe = {"model": {"family": "moe", "preset": "8x1b"}}
    assert any(plan.expert == 8 for plan in plans("8 h100", **moe))
    assert all(plan.expert == 1 for plan in plans("8 h100"))


def test_gradients_of_16_bits_are_guessed_to_be_exchanged_within_a_host() -> None:
    """Where sharding is what a step waits for: little to compute."""
    base = BASE_8B._replace(compute_s=1e-3)

    def step_s(on: str, shard: int, precision: str) -> float:
        cluster = Cluster.parse(on)
        plan = Plan(shard=shard, zero=2, micro_batch=1)
        settings = job(train={"precision": precision, "global_batch": shard})
        return guess(plan, base, settings, costs_of(cluster)).step_s

    near, far = step_s("8 h100", 8, "bf16"), step_s("2x8 h100", 16, "bf16")
    assert near < 0.65 * step_s("8 h100", 8, "fp32")
    assert far > 1.5 * near


def test_small_llamas_are_recorded_where_a_run_would_record_them() -> None:
    small, large = job(model={"preset": "433m"}), job()
    base = BASE_8B._replace(parameters=433_000_000)
    found = list(with_few_launches(small, Cluster.parse("8 h100"), base))
    recorded = [plan for plan in found if plan.cuda_graphs]
    assert recorded and all(plan.shard == 8 and plan.recompute == "none" for plan in recorded)
    assert any(plan.compile == "model" for plan in found if plan.replicate == 8)
    assert not any(plan.cuda_graphs for plan in with_few_launches(large, Cluster.parse("8 h100"), BASE_8B))


def test_what_is_said_is_kept() -> None:
    found = plans("8 h100", plan={"tensor": 2, "recompute": "full"})
    assert found and all(plan.tensor == 2 and plan.recompute == "full" for plan in found)


def test_what_is_said_of_an_axis_is_kept_where_a_plan_has_it() -> None:
    found = plans("8 h100", plan={"schedule": "gpipe", "zero": 1})
    assert {plan.schedule for plan in found if plan.pipeline > 1} == {"gpipe"}
    assert {plan.zero for plan in found if plan.shard > 1} == {1}
    assert any(plan.pipeline == 1 for plan in found) and any(plan.replicate == 8 for plan in found)


def test_a_batch_that_does_not_divide_has_no_plan_of_samples_alone() -> None:
    assert all(plan.data_degree < 8 for plan in plans("8 h100", train={"global_batch": 4}))


def step_s(on: str, **keys: Any) -> float:
    cluster = Cluster.parse(on)
    return guess(Plan.model_validate(keys), BASE_8B, job(), costs_of(cluster)).step_s


def test_a_guess_knows_what_is_slow() -> None:
    shard = step_s("8 h100", shard=8, micro_batch=1)
    assert shard < step_s("8 h100", shard=8, micro_batch=1, recompute="full")
    assert shard < step_s("8 h100", tensor=8, micro_batch=1)
    assert shard < step_s("8 h100", pipeline=8, micro_batch=1)
    far = {"tensor": 8, "shard": 2, "micro_batch": 1}
    assert step_s("2x8 h100", **far) < step_s("16x1 h100", **far)


def test_a_guess_knows_what_is_large() -> None:
    def state(**keys: Any) -> float:
        return guess(Plan.model_validate(keys), BASE_8B, job(), costs_of(Cluster.parse("8 h100"))).state_bytes

    whole = state(replicate=8)
    assert whole == 16 * BASE_8B.parameters
    assert whole > state(shard=8, zero=1) > state(shard=8, zero=2) > state(shard=8, zero=3) > whole / 8
