"""Strategies are plans that the words make again, and numbers of devices are few."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cluster import Cluster
from shoal.config import Settings, apply_overrides, parse
from shoal.plan import Plan
from shoal.planner.strategies import STRATEGIES, clusters_of, in_force, plan_of, strategies_of, words_of


def settings_of(**tables: Any) -> Settings:
    tables = {"train": {"global_batch": 64}, **tables}
    return parse(tables, where="test")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1 h100", [1]),
        ("3 cpu", [1, 3]),
        ("8 h100", [1, 2, 4, 8]),
        ("16 h100", [1, 2, 8, 16]),
        ("2x8 h100", [1, 8, 16]),
        ("4x8 h100", [1, 8, 16, 32]),
        ("128x8 h100", [1, 8, 64, 1024]),
        ("7x8 h100", [1, 8, 56]),
        ("4x1 h100", [1, 2, 4]),
    ],
)
def test_numbers_of_devices_go_from_one_to_all_and_are_at_most_four(text: str, counts: list[int]) -> None:
    parts = clusters_of(Cluster.parse(text))
    assert [part.num_devices for part in parts] == counts
    assert parts[-1] == Cluster.parse(text)


SAID: list[dict[str, Any]] = [
    {},
    {"micro_batch": 2},
    {
        "shard": 4,
        "zero": 2,
        "tensor": 2,
        "micro_batch": 4,
        "recompute": "selective",
        "recompute_keep": ["attention"],
    },
    {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2, "offload": ["optimizer"], "compile": False},
    {"context": 2, "context_by": "all_to_all", "zero": 3},
]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("text", ["1 h100", "8 h100", "4x8 h100"])
def test_the_words_of_a_strategy_make_its_plan_whatever_the_job_file_says(
    said: dict[str, Any], text: str
) -> None:
    settings, cluster = settings_of(plan=said) if said else settings_of(), Cluster.parse(text)
    made = 0
    for strategy in STRATEGIES:
        try:
            plan = plan_of(strategy, settings, cluster, 2)
        except ValueError as error:
            assert str(error)
            continue
        words = words_of(plan, settings).split()
        again = parse(apply_overrides({"plan": said} if said else {}, words), where="words").plan
        assert again is not None and again.says_degrees, words
        assert in_force(again, 64) == in_force(plan, 64), words
        assert plan.world_size == cluster.num_devices
        made += 1
    assert made


def test_a_rank_takes_the_wanted_micro_batch_or_fewer_and_a_pipeline_has_enough_of_them() -> None:
    settings, cluster = settings_of(), Cluster.parse("8 h100")
    by_key = {each.key: each for each in STRATEGIES}
    assert plan_of(by_key["zero3"], settings, cluster, 16).micro_batches(64) == (1, 8)
    assert plan_of(by_key["zero3"], settings, cluster, 3).micro_batches(64) == (4, 2)
    assert plan_of(by_key["pipeline"], settings, cluster, 64).micro_batches(64) == (8, 8)


def test_strategies_are_those_of_the_model_and_the_cluster() -> None:
    def keys(family: str, text: str) -> set[str]:
        settings = settings_of(model={"family": family})
        return {each.key for each in strategies_of(settings, Cluster.parse(text))}

    assert keys("llama", "8 h100") == {each.key for each in STRATEGIES} - {"experts", "hybrid"}
    assert {"hybrid", "experts"} <= keys("moe", "2x8 h100")
    assert "tensor" not in keys("mine:build", "8 h100") and "copies" in keys("mine:build", "8 h100")


def test_two_plans_that_say_the_same_are_the_same_in_force() -> None:
    assert in_force(Plan(shard=8), 64) == in_force(Plan(shard=8, zero=3, micro_batch=8), 64)
    assert in_force(Plan(shard=8, zero=2), 64) != in_force(Plan(shard=8, zero=3), 64)
    assert json.dumps(in_force(Plan(pipeline=2), 64)) != json.dumps(
        in_force(Plan(pipeline=2, schedule="gpipe"), 64)
    )
