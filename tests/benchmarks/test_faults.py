"""The campaign of failures judges by an undisturbed run."""

from __future__ import annotations

import pytest

from benchmarks.faults import PLANS, _undisturbed, attempt, schedules, singles
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
        ranks = 4 if "x" in plan else 2
        require_possible(drawn(parse_faults(text), ranks, steps=6), ranks, steps=6)
    assert {plan for plan, _ in asked} == set(PLANS)
    kinds = {text.split()[0] for _, text in asked}
    assert kinds >= set(ALL_KINDS) - {"slow", "flip", "loader"}
