"""The campaign of failures judges by an undisturbed run."""

from __future__ import annotations

import pytest

from benchmarks.faults import PLANS, _ranks, _undisturbed, attempt, machines_of, schedules, singles
from benchmarks.faults_machines import KINDS, read_blows
from shoal.resilience.faults import ALL_KINDS, drawn, parse_faults, require_possible


@pytest.mark.usefixtures("warm_nursery")
def test_a_run_that_went_on_is_right_and_one_with_other_numbers_is_not() -> None:
    right = _undisturbed("shard 2", None)
    found = attempt("shard 2", "kill rank=1 step=3 phase=update", right, None)
    assert found["right"], found
    assert found["restarts"] == 1
    other = right._replace(tensors=right.tensors | {"model.norm.weight": b""})
    assert not attempt("shard 2", "exit rank=0 step=2 phase=data", other, None)["right"]


def test_faults_of_a_campaign_are_possible_and_the_same_for_a_seed() -> None:
    asked = [*singles(200, seed=0), *schedules(50, seed=0)]
    assert asked == [*singles(200, seed=0), *schedules(50, seed=0)]
    assert asked != [*singles(200, seed=1), *schedules(50, seed=1)]
    for plan, text in asked:
        ranks, nodes = _ranks(plan), machines_of(plan)
        ours, blows = read_blows(text)
        require_possible(drawn(parse_faults(ours), ranks, steps=6), ranks, steps=6, nodes=nodes > 0)
        assert all(1 <= blow.node <= nodes for blow in blows), (plan, text)
    assert {plan for plan, _ in asked} == set(PLANS)
    kinds = {text.split()[0] for _, text in asked}
    assert kinds >= {*ALL_KINDS, *KINDS} - {"slow", "flip", "loader"}


def test_a_machine_that_is_killed_is_started_again_and_the_run_is_right() -> None:
    plan = "2 machines, replicate 2"
    right = _undisturbed(plan, None)
    found = attempt(plan, "lead node=1 step=2", right, None)
    assert found["right"], found
    assert found["next_step_s"].keys() == {"lead"}
