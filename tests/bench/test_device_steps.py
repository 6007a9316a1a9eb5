"""What a host needs for whole steps is measured by steps, and the planner's steps then take as long."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.bench.device import _in_steps
from shoal.bench.device_steps import COMPILED, EAGER, MOST, agreeing, in_steps, settings_of, step_s
from shoal.cluster import Cluster
from shoal.observe.status import RankStatus
from shoal.planner.predict import predict
from shoal.planner.profile import Profile, shipped_profiles
from shoal.run import Run
from shoal.world import World
from tests.ranks import run_ranks

H200 = shipped_profiles()["h200"].model_copy(update={"devices": 2})
OPERATORS = 1000


def launched_one_by_one(profile: Profile) -> float:
    """A step that does nothing but launch, and 1 ms."""
    return 1e-3 + OPERATORS * profile.host.operator_s


@pytest.mark.parametrize("times", [1.0, 1.5, 4.0])
def test_a_step_is_predicted_as_it_was_measured(times: float) -> None:
    measured_s = 1e-3 + OPERATORS * times * H200.host.operator_s
    found = agreeing(H200, "operator_s", measured_s, launched_one_by_one)
    assert launched_one_by_one(found) == pytest.approx(measured_s)
    assert found.host.graph_s == H200.host.graph_s
    assert found.matmuls == H200.matmuls


def test_a_step_that_was_faster_changes_nothing_and_one_that_hung_not_everything() -> None:
    assert agreeing(H200, "operator_s", 1e-3, launched_one_by_one) == H200
    hung = agreeing(H200, "operator_s", 10.0, launched_one_by_one)
    assert hung.host.operator_s == pytest.approx(MOST * H200.host.operator_s)
    assert agreeing(H200, "graph_s", 10.0, launched_one_by_one) == H200  # of which the step has none


def test_what_the_planner_says_of_the_same_steps_agrees() -> None:
    cluster = Cluster.parse("1x2 h200")
    found = in_steps(H200, cluster, {EAGER: 0.050, COMPILED: 0.035})
    for how, measured_s in ((EAGER, 0.050), (COMPILED, 0.035)):
        settings = settings_of(2, how)
        assert settings.plan is not None
        assert predict(settings, settings.plan, cluster, profile=found).timing.seconds == pytest.approx(
            measured_s, rel=0.02
        )
    assert in_steps(H200, cluster, {}) == H200


def test_it_is_done_in_a_process_that_sees_no_gpu_and_what_fails_there_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster.parse("8 h200")  # of which two were measured
    found = _in_steps(H200, cluster, {EAGER: 0.050})
    assert found == in_steps(H200, Cluster.parse("2 h200"), {EAGER: 0.050})
    unknown = H200.model_copy(update={"device": "abacus"})
    assert _in_steps(unknown, cluster, {EAGER: 0.050}) == unknown
    assert "the host's time for whole steps is not in the profile: ValueError: " in capfd.readouterr().err


def take_steps(world: World, folder: Path) -> float:
    return step_s(world, Run(folder), RankStatus(None, 0), EAGER)


def test_ranks_take_the_steps(tmp_path: Path) -> None:
    assert all(0 < seconds < 30 for seconds in run_ranks(2, take_steps, tmp_path))
