"""With run.search the plan is the search's, asked for once, and the rules' if it finds none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shoal.launch.ready as ready
import shoal.planner.auto as auto
from shoal.cluster import DEVICES, Cluster
from shoal.config import ConfigError, Settings
from shoal.plan import Plan
from shoal.planner.auto import Answer, plan_key, searched_plan, why_not_searched
from shoal.planner.search import measure_base, search
from shoal.planner.show import search_as_json
from tests.planner.made import made_settings

EIGHT = Cluster.parse("8 h100")


def settings(cache: Path, **tables: Any) -> Settings:
    return made_settings(**{"plan": {"compile": False}, "run": {"cache": str(cache)}, **tables})


def searching(cache: Path, **tables: Any) -> Settings:
    return settings(cache, run={"cache": str(cache), "search": True}, **tables)


def test_the_plan_is_the_searchs_and_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = settings(tmp_path)
    best = search(job, EIGHT, measure_base(job, EIGHT), most=1)
    asked: list[Cluster] = []

    def ask(settings: Settings, cluster: Cluster, _deadline_s: float) -> str:
        asked.append(cluster)
        return json.dumps(search_as_json(best, settings, None))

    monkeypatch.setattr(auto, "_ask", ask)
    for _ in range(2):
        found = searched_plan(job, EIGHT)
        assert found.plan == best.ranked[0].plan and "of 1 plans that were simulated" in found.why
    assert asked == [EIGHT]


def test_a_search_in_a_process_of_its_own_is_kept_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "SIMULATIONS", 1)
    two = Cluster.parse("2 h100")
    found = searched_plan(settings(tmp_path), two)
    assert found.plan is not None and found.plan.world_size == 2, found.why
    assert str(next((tmp_path / "plans").glob("*.json"))) in found.why
    monkeypatch.setattr(auto, "_ask", None)
    assert searched_plan(settings(tmp_path), two).plan == found.plan


def test_what_the_answer_depends_on_is_asked_anew(tmp_path: Path) -> None:
    jobs = [
        settings(tmp_path),
        settings(tmp_path, train={"global_batch": 32}),
        settings(tmp_path, plan={"zero": 3}),
    ]
    keys = {plan_key(job, EIGHT) for job in jobs} | {plan_key(jobs[0], Cluster.parse("4 h100"))}
    assert len(keys) == 4
    elsewhere = settings(tmp_path / "other")
    assert plan_key(elsewhere, EIGHT) == plan_key(jobs[0], EIGHT)


def test_a_search_that_takes_too_long_or_fails_is_no_answer(tmp_path: Path) -> None:
    found = searched_plan(settings(tmp_path), EIGHT, deadline_s=0.01)
    assert found.plan is None and "more than 0 s" in found.why and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("cluster", "plan", "why"),
    [
        ("8 h100", {"micro_batch": 1}, ""),
        ("8 h100", {"shard": 8}, "the plan is said (shard 8"),
        ("2 cpu", {}, "CPUs"),
    ],
)
def test_only_what_is_left_open_on_gpus_is_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, plan: dict[str, Any], why: str
) -> None:
    found = why_not_searched(settings(tmp_path, plan=plan), Cluster.parse(cluster))
    assert why in found and bool(found) is bool(why)
    unknown = EIGHT.model_copy(update={"device": DEVICES["h100"].model_copy(update={"kind": "mine"})})
    assert why_not_searched(settings(tmp_path), unknown)
    monkeypatch.setattr(ready, "detect_cluster", lambda: Cluster.parse(cluster))
    if why:
        with pytest.raises(ConfigError, match=r"run\.search = true, but"):
            ready.make_ready(searching(tmp_path, plan=plan), searched=print)


@pytest.mark.parametrize(
    "answer",
    [Answer(Plan(shard=8, micro_batch=2, cuda_graphs=True), "fast"), Answer(None, "it cannot be built")],
)
def test_a_run_takes_the_answer_or_the_rules_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(ready, "detect_cluster", lambda: EIGHT)
    monkeypatch.setattr(ready, "searched_plan", lambda *_: answer)
    told: list[str] = []
    plan = ready.make_ready(searching(tmp_path), searched=told.append).plan
    assert plan == (answer.plan or ready.complete_plan(settings(tmp_path), EIGHT))
    assert ready.make_ready(settings(tmp_path), searched=told.append).plan == ready.complete_plan(
        settings(tmp_path), EIGHT
    )  # nobody asked for a search
    assert answer.why in told[-1] and ("rules" in told[-1]) is (answer.plan is None)
