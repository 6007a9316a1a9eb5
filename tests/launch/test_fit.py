"""The plan of a job for fewer ranks than it asks for."""

from __future__ import annotations

import pytest

from shoal.config import ConfigError, Settings
from shoal.launch.nodes.fit import fitted, smaller
from shoal.plan import Plan


@pytest.mark.parametrize(
    ("plan", "ranks", "sizes"),
    [
        (Plan(replicate=4), 3, [3, 2, 1]),
        (Plan(replicate=4), 9, [4, 3, 2, 1]),  # what is said is the most
        (Plan(shard=4), 3, [3, 2, 1]),
        (Plan(replicate=2, shard=4), 7, [4, 3, 2, 1]),  # whole copies, then parts of one
        (Plan(shard=2, tensor=2, pipeline=2), 7, [4]),
        (Plan(tensor=4), 3, []),
        (Plan(shard=4, expert=4), 3, []),
    ],
)
def test_degrees_that_share_data_get_smaller(plan: Plan, ranks: int, sizes: list[int]) -> None:
    found = [*smaller(plan, ranks)]
    assert [size for size, _ in found] == sizes
    for size, smaller_plan in found:
        assert smaller_plan is not None
        assert smaller_plan.world_size == size
        assert (smaller_plan.tensor, smaller_plan.pipeline) == (plan.tensor, plan.pipeline)


def test_what_else_was_said_stays() -> None:
    _, plan = next(smaller(Plan(shard=4, zero=2, micro_batch=3, recompute="full"), 2))
    assert plan is not None
    assert (plan.shard, plan.zero, plan.micro_batch, plan.recompute) == (2, 2, 3, "full")
    _, alone = next(smaller(Plan(shard=4, zero=2), 1))
    assert alone is not None
    assert alone.zero is None  # there is nothing to cut


def test_a_plan_that_is_not_said_is_chosen_for_the_ranks() -> None:
    assert [*smaller(None, 3)] == [(3, None), (2, None), (1, None)]
    assert [*smaller(Plan(micro_batch=2), 2)] == [(2, None), (1, None)]


def test_the_largest_that_the_batch_allows_is_taken_and_the_first_reason_is_told() -> None:
    def ready(settings: Settings, ranks: int) -> Settings:
        if 12 % ranks:
            raise ConfigError(f"12 samples over {ranks} ranks")
        assert settings.plan is not None
        return settings

    said = Settings().with_plan(Plan(replicate=8))
    found, why = fitted(said, 7, ready)
    assert found is not None
    assert found.plan is not None
    assert (found.plan.replicate, why) == (6, "")

    def never(settings: Settings, ranks: int) -> Settings:
        raise ConfigError(f"no {ranks}")

    assert fitted(said, 5, never) == (None, "no 5")
    none, why = fitted(Settings().with_plan(Plan(tensor=4)), 3, never)
    assert none is None
    assert "fewer than the plan's axes need" in why
