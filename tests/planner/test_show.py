"""What a person is told of a prediction."""

from __future__ import annotations

import pytest

from shoal.cluster import Cluster
from shoal.plan import Plan
from shoal.planner.show import show
from tests.planner.made import made_prediction, made_settings


def told(plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    cluster = Cluster.parse(f"{plan.world_size} h100")
    show(made_prediction(made_settings(), plan, cluster))
    return capsys.readouterr().out


def test_of_a_long_pipeline_the_ends_and_the_ranks_with_most_memory_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = told(Plan(pipeline=16), capsys)
    assert [word for word in ("rank 0", "rank 1 ", "rank 15", "rank 9") if word in text] == [
        "rank 0",
        "rank 1 ",
        "rank 15",
    ]
    assert "and 10 more of the pipeline, 11.50 to 11.50 GiB; --json has all" in text


def test_of_a_short_pipeline_all_ranks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(Plan(pipeline=6), capsys)
    assert "rank 5" in text
    assert "more of the pipeline" not in text
