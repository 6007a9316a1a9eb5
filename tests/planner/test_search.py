"""A search gives the fastest of the plans that fit, says of the others why not, and simulates no more than it is asked to."""

from __future__ import annotations

from typing import Any

import pytest

import shoal.planner.pool as pool
import shoal.planner.search as search_module
from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.models.presets import resolve
from shoal.plan import Plan
from shoal.planner.candidates import Base, Guess
from shoal.planner.memory import Fit
from shoal.planner.predict import Prediction
from shoal.planner.search import in_order, measure_base, search
from tests.planner.made import made_prediction, made_settings, made_timing

BASE = Base(7 * GIB, GIB // 4, 32, 0.1, GIB, 1 << 20)


def made(settings: Settings, plan: Plan, cluster: Cluster, **_: Any) -> Prediction:
    """Tensor is slow, recompute too, and what is not cut does not fit."""
    seconds = 1.0 * plan.tensor * (1.5 if plan.recompute == "full" else 1.0) + 0.01 * plan.pipeline
    prediction = made_prediction(settings, plan, cluster, gib=300.0)
    return prediction._replace(timing=made_timing(plan, seconds))


@pytest.fixture
def instantly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "predict", made)
    monkeypatch.setattr(pool, "FEW", 1000)


@pytest.mark.usefixtures("instantly")
def test_the_fastest_plan_that_fits_is_first_and_the_others_have_a_reason() -> None:
    found = search(made_settings(), Cluster.parse("8 h100"), BASE, most=200)
    seconds = [each.timing.seconds for each in found.ranked]
    assert seconds == sorted(seconds) and found.ranked[0].plan.tensor == 1
    assert all(each.fit is not Fit.NOT for each in found.ranked)
    assert found.rejected and all("does not fit by" in each.why for each in found.rejected)
    assert found.considered == found.too_large + found.simulated + len(found.passed_over)


@pytest.mark.usefixtures("instantly")
def test_what_is_not_simulated_could_not_have_won(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, cluster = made_settings(), Cluster.parse("8 h100")
    found = search(settings, cluster, BASE, most=200)
    assert found.passed_over and all("by a guess" in each.why for each in found.passed_over)
    best = found.ranked[0].timing.seconds
    assert all(made(settings, each.plan, cluster).timing.seconds >= best for each in found.passed_over)
    monkeypatch.setattr(search_module, "UNSURE", 1.0)  # nothing is sure: all but pipelines are simulated
    everything = search(settings, cluster, BASE, most=2000)
    assert all(each.plan.pipeline > 1 for each in everything.passed_over)
    assert everything.ranked[0].plan == found.ranked[0].plan
    assert everything.simulated > found.simulated


def in_host_memory(settings: Settings, plan: Plan, cluster: Cluster, **_: Any) -> Prediction:
    """Nothing fits whose optimizer is on the device."""
    gib = 1.0 if "optimizer" in plan.offload else 10_000.0
    prediction = made_prediction(settings, plan, cluster, gib=gib)
    return prediction._replace(timing=made_timing(plan, 2.0 if "parameters" in plan.offload else 1.0))


def test_where_nothing_fits_host_memory_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "predict", in_host_memory)
    monkeypatch.setattr(pool, "FEW", 1000)
    found = search(made_settings(), Cluster.parse("8 h100"), BASE, most=6)
    assert found.ranked[0].plan.offload == (
        "optimizer",
    )  # and "parameters" too where it may be faster, which it is not
    assert (
        sum(not each.plan.offload for each in found.rejected) == 6
    )  # as many as asked for, and then a few more
    assert found.simulated <= 6 + search_module.LAST
    assert found.considered == found.too_large + found.simulated + len(found.passed_over)


def in_a_pipeline(settings: Settings, plan: Plan, cluster: Cluster, **_: Any) -> Prediction:
    return made_prediction(settings, plan, cluster, gib=1.0 if plan.pipeline > 1 else 10_000.0)


def test_pipelines_are_looked_at_before_host_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "predict", in_a_pipeline)
    monkeypatch.setattr(pool, "FEW", 1000)
    found = search(made_settings(), Cluster.parse("8 h100"), BASE, most=12)
    assert found.ranked and all(each.plan.pipeline > 1 and not each.plan.offload for each in found.ranked)


def test_where_host_memory_does_not_help_no_more_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "predict", in_host_memory)
    monkeypatch.setattr(pool, "FEW", 1000)
    monkeypatch.setattr(search_module, "OFFLOADS", ())
    told: list[tuple[int, int]] = []
    found = search(
        made_settings(),
        Cluster.parse("8 h100"),
        BASE,
        most=6,
        tell=lambda _, done, of: told.append((done, of)),
    )
    assert found.simulated == 6 and told[-1] == (6, 6)


def test_what_the_job_says_of_offload_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "predict", in_host_memory)
    monkeypatch.setattr(pool, "FEW", 1000)
    found = search(made_settings(plan={"offload": []}), Cluster.parse("8 h100"), BASE, most=6)
    assert not found.ranked and not any(each.plan.offload for each in found.rejected)


def test_a_model_whose_states_fit_only_in_host_memory_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "predict", in_host_memory)
    monkeypatch.setattr(pool, "FEW", 1000)
    large = BASE._replace(parameters=100 * GIB)  # 16 bytes each, over 8 devices of 80 GiB
    found = search(made_settings(), Cluster.parse("8 h100"), large)
    assert found.ranked and all(each.plan.offload for each in found.ranked)


@pytest.mark.usefixtures("instantly")
def test_no_more_are_simulated_than_asked_for() -> None:
    told: list[tuple[str, int, int]] = []
    found = search(
        made_settings(),
        Cluster.parse("8 h100"),
        BASE,
        most=5,
        tell=lambda text, done, of: told.append((text, done, of)),
    )
    assert found.simulated == 5 and [(done, of) for _, done, of in told] == [(n, 5) for n in range(1, 6)]


def test_a_plan_whose_simulation_fails_is_rejected_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(settings: Settings, plan: Plan, cluster: Cluster, **_: Any) -> Prediction:
        if plan.shard > 1:
            raise RuntimeError("my model cannot")
        return made(settings, plan, cluster)

    monkeypatch.setattr(pool, "predict", fails)
    monkeypatch.setattr(pool, "FEW", 1000)
    found = search(made_settings(), Cluster.parse("8 h100"), BASE, most=200)
    assert found.ranked and any("RuntimeError: my model cannot" in each.why for each in found.rejected)


def test_a_batch_that_nobody_can_deal_out_is_refused() -> None:
    settings = made_settings(
        train={"global_batch": 3}, model={"preset": "1m", "heads": 1, "kv_heads": 1, "layers": 1}
    )
    with pytest.raises(ValueError, match="multiple"):
        search(settings, Cluster.parse("7 h100"), BASE)


def test_the_best_of_each_kind_comes_first_and_what_hardly_fits_last() -> None:
    def each(seconds: float, memory: float = 1.0, **keys: Any) -> Guess:
        return Guess(Plan.model_validate(keys), 0.0, memory, 0.0, seconds)

    fast, slower = each(1.0, shard=8, micro_batch=1), each(1.1, shard=8, micro_batch=2)
    tensor, large = each(3.0, tensor=8), each(0.5, 99.0, replicate=8)
    order = in_order([large, slower, tensor, fast], memory_bytes=10)
    assert order == [fast, tensor, slower, large]


def test_what_guesses_are_scaled_from_is_simulated() -> None:
    settings = made_settings(train={"precision": "bf16", "global_batch": 64})
    found = measure_base(settings, Cluster.parse("8 h100"))
    assert found.blocks > 1 and found.parameters > found.blocks * found.block_parameters
    assert found.compute_s > 0 and found.activation_bytes > found.boundary_bytes > 0
    dims = resolve(settings.model)
    assert found.boundary_bytes == settings.data.seq_len * dims.dim * 2  # one sample in bf16


def test_a_real_search_ends_with_a_plan_that_can_be_had() -> None:
    settings, cluster = made_settings(plan={"compile": False}), Cluster.parse("2 h100")
    found = search(settings, cluster, measure_base(settings, cluster), most=2)
    assert found.ranked and found.ranked[0].plan.world_size == 2
    assert found.ranked[0].timing.seconds > 0
