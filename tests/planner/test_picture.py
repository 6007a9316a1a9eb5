"""A picture's data has every choice once, with its memory or the reason why it can't be, and is plain."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shoal.planner.pool as pool
from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.choose import Workload
from shoal.planner.picture import make_picture
from shoal.planner.predict import Prediction, predict
from tests.planner.made import made_prediction, made_settings

WORK = Workload(10**9, 0)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, Cluster]]:
    """Made predictions instead of simulations, in this process; what was asked for."""
    asked: list[tuple[Plan, Cluster]] = []

    def made(settings: Settings, plan: Plan, cluster: Cluster, **more: Any) -> Prediction:
        asked.append((plan, cluster))
        if plan.tensor > 1 and cluster.num_devices == 2:
            raise ValueError("no tensor on two\nand more")
        if plan.recompute == "full":
            raise KeyError("mine")
        return made_prediction(settings, plan, cluster)

    monkeypatch.setattr(pool, "predict", made)
    monkeypatch.setattr(pool, "FEW", 1000)
    return asked


def of(made: dict[str, Any], strategy: str, devices: int) -> dict[str, Any]:
    (found,) = [
        each for each in made["options"] if (each["strategy"], each["devices"]) == (strategy, devices)
    ]
    return found


def test_every_strategy_has_an_option_on_every_number_of_devices(simulated: list[Any]) -> None:
    made = make_picture(made_settings(), Cluster.parse("8 h100"), WORK)
    assert made["devices"] == [1, 2, 4, 8]
    for strategy in made["strategies"]:
        for devices in made["devices"]:
            option = of(made, strategy["key"], devices)
            assert bool(option["ranks"]) == (option["reason"] is None) == (option["fit"] is not None)
            assert option["reason"] is None or option["reason"].strip()
            assert sum(rank["stands_for"] for rank in option["ranks"]) in (0, devices)


def test_the_data_round_trips_through_json_and_adds_up(simulated: list[Any]) -> None:
    made = make_picture(made_settings(), Cluster.parse("4 h100"), WORK)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    for option in made["options"]:
        step = option["step"]
        assert (step is None) == bool(option["reason"])
        if step is not None:
            assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
            assert all(span["end_s"] <= step["seconds"] for span in option["timeline"])
        for rank in option["ranks"]:
            assert sum(rank["by_category"].values()) == rank["allocated_bytes"] <= rank["reserved_bytes"]
            assert rank["device_bytes"] == rank["reserved_bytes"] + rank["outside_bytes"]
            assert set(rank["by_category"]) <= {each["key"] for each in made["categories"]}
    copies, cut = (of(made, key, 4)["ranks"][0]["by_category"]["parameters"] for key in ("copies", "zero3"))
    assert copies == 4 * cut
    assert len(of(made, "pipeline", 4)["ranks"]) == 4


def test_what_cannot_be_has_the_reason_of_the_check_or_of_the_simulation(simulated: list[Any]) -> None:
    made = make_picture(made_settings(train={"global_batch": 4}), Cluster.parse("8 h100"), WORK)
    assert "global_batch = 4 cannot be dealt out" in of(made, "copies", 8)["reason"]
    assert of(made, "copies", 4)["reason"] is None
    assert of(made, "tensor", 2)["reason"] == "no tensor on two"
    assert of(made, "zero3_recompute", 2)["reason"] == "its simulation failed: KeyError: 'mine'"
    assert of(made, "zero3", 1)["reason"] == "one device has nobody to share with"


def test_each_plan_is_simulated_once_and_the_persons_own_not_again(
    simulated: list[tuple[Plan, Cluster]],
) -> None:
    settings, cluster = made_settings(plan={"shard": 4, "zero": 3, "micro_batch": 4}), Cluster.parse("4 h100")
    assert settings.plan is not None
    own, told = made_prediction(settings, settings.plan, cluster, gib=40), []
    made = make_picture(settings, cluster, WORK, own=own, tell=lambda *each: told.append(each))
    asked = [(plan.describe(), part.describe()) for plan, part in simulated]
    assert len(asked) == len(set(asked)) and (settings.plan.describe(), "4 h100") not in asked
    assert made["strategies"][0]["key"] == "own" and made["said"]
    assert of(made, "own", 4)["ranks"] == of(made, "zero3", 4)["ranks"] != of(made, "zero2", 4)["ranks"]
    assert "this plan is for 4 devices" in of(made, "own", 2)["reason"]
    assert [each[1:] for each in told] == [(number + 1, len(asked)) for number in range(len(asked))]


def test_recompute_that_the_job_asks_for_is_kept_and_not_shown_twice(
    simulated: list[tuple[Plan, Cluster]],
) -> None:
    make_picture(made_settings(plan={"recompute": "full"}), Cluster.parse("2 h100"), WORK)
    assert all(plan.recompute == "full" for plan, _ in simulated)
    assert sum(plan.shard == 2 and plan.zero_stage == 3 for plan, _ in simulated) == 1


def test_another_process_simulates_what_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FEW", 0)
    settings, cluster = made_settings(model={"preset": "1m", "layers": 1}), Cluster.parse("1 cpu")
    option = of(make_picture(settings, cluster, WORK), "one", 1)
    here = predict(settings, Plan(micro_batch=1), cluster)
    assert option["ranks"][0]["allocated_bytes"] == here.ranks[0].memory.peak.allocated_bytes > 0
