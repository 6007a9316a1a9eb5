"""The largest that fits is the last value that does, and the smallest cluster the first on which any plan does."""

from __future__ import annotations

from typing import Any

import pytest

import shoal.planner.pool as pool
import shoal.planner.questions as questions
from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.candidates import Base
from shoal.planner.memory import Fit, judge
from shoal.planner.predict import Prediction
from shoal.planner.questions import Size, largest, parts_of, smallest
from tests.planner.made import made_prediction, made_settings

ONE = Cluster.parse("1 h100")


def grows(settings: Settings, plan: Plan, cluster: Cluster, **_: Any) -> Prediction:
    """A GiB for each sample of a micro-batch, each 1,024 tokens and each layer, and 10 more."""
    layers = settings.model.layers or 4
    gib = 10 + plan.micro_batches(settings.train.global_batch)[1] + settings.data.seq_len / 1024 + layers
    made = made_prediction(settings, plan, cluster, gib=1)
    peak = made.ranks[0].memory.peak
    memory = made.ranks[0].memory._replace(peak=peak, reserved_bytes=int(gib * GIB))
    return made._replace(ranks=[made.ranks[0]._replace(memory=memory, verdict=judge(memory, plan, cluster))])


@pytest.mark.parametrize("size", ["micro_batch", "seq_len", "layers"])
@pytest.mark.parametrize("batch", [96, 8])
def test_the_largest_is_the_last_that_fits(monkeypatch: pytest.MonkeyPatch, size: Size, batch: int) -> None:
    monkeypatch.setattr(questions, "predict", grows)
    settings = made_settings(
        train={"global_batch": batch}, data={"source": "synthetic", "vocab": 320, "seq_len": 2048}
    )
    plan = Plan(micro_batch=2)
    found = largest(settings, plan, ONE, size)
    values = questions._values(settings, plan, size)
    fitting = [
        value
        for value in values[:200]
        if grows(*questions._with(settings, plan, size, value), ONE).fit is not Fit.NOT
    ]
    assert found.value == fitting[-1]
    assert found.too_large == (None if fitting == values else values[len(fitting)])
    assert found.prediction is not None and found.prediction.fit is not Fit.NOT


def test_what_never_fits_has_no_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "predict", grows)
    settings = made_settings(model={"preset": "1m", "layers": 99})
    found = largest(settings, Plan(), ONE, "micro_batch")
    assert found.value is None and found.prediction is None and found.too_large == 1


def test_layers_of_a_model_of_ones_own_are_no_setting() -> None:
    settings = made_settings()
    own = settings.model_copy(update={"model": settings.model.model_copy(update={"family": "mine:build"})})
    with pytest.raises(ValueError, match="mine:build"):
        largest(own, Plan(), ONE, "layers")


def test_parts_are_devices_of_a_node_and_then_nodes() -> None:
    found = [part.describe() for part in parts_of(Cluster.parse("6x8 h100"))]
    assert found == ["1 h100", "2 h100", "4 h100", "8 h100", "2x8 h100", "4x8 h100", "6x8 h100"]


def test_the_smallest_cluster_is_the_first_on_which_a_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Base(7 * GIB, GIB // 4, 32, 0.1, GIB, 1 << 20)  # 7.5G parameters, of which each takes 16 bytes
    settings = made_settings(train={"global_batch": 64, "precision": "bf16"})
    asked: list[Plan] = []

    def made(settings: Settings, plan: Plan, cluster: Cluster, **_: Any) -> Prediction:
        asked.append(plan)
        return made_prediction(settings, plan, cluster, gib=200.0)

    monkeypatch.setattr(pool, "predict", made)
    told: list[str] = []
    assert smallest(settings, Cluster.parse("4x8 h100"), base, tell=told.append) == Cluster.parse("4 h100")
    assert "1 h100: parameters" in told[0], "it is not simulated where its states cannot fit"
    assert {plan.world_size for plan in asked} == {2, 4}
    assert smallest(settings, Cluster.parse("2 h100"), base) is None
