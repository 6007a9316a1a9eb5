"""A run is started again where that can help, and not where it would fail again."""

from __future__ import annotations

from shoal.resilience.restarts import Failure, Restarts

KILL = Failure("rank 1 was killed by SIGKILL in step 3, phase forward", raised=False, begun=0, done=3)
ERROR = Failure("rank 1 failed in step 3, phase data: ValueError: bad sample", raised=True, begun=0, done=3)


def test_what_came_from_outside_is_answered_by_a_restart_as_often_as_is_said() -> None:
    restarts = Restarts(most=2)
    assert [restarts.refuse(KILL) is None for _ in range(3)] == [True, True, False]
    assert restarts.number == 2


def test_steps_that_went_well_begin_the_count_anew() -> None:
    restarts = Restarts(most=1)
    assert restarts.refuse(KILL) is None
    assert restarts.refuse(KILL._replace(done=4)) is None
    assert "no further than step 4" in (restarts.refuse(KILL._replace(done=4)) or "")


def test_a_step_that_was_lost_and_taken_again_is_no_way_further() -> None:
    restarts = Restarts(most=1)
    assert restarts.refuse(KILL._replace(done=9)) is None
    assert restarts.refuse(KILL._replace(done=5)) is not None


def test_an_exception_before_any_step_ends_a_run_at_once() -> None:
    refused = Restarts(most=9).refuse(ERROR._replace(begun=3))
    assert refused is not None
    assert "no step was done" in refused


def test_an_exception_that_comes_again_ends_a_run_and_another_one_does_not() -> None:
    restarts = Restarts(most=9)
    assert restarts.refuse(ERROR) is None
    assert restarts.refuse(ERROR._replace(headline="rank 0 failed in step 5: OSError", done=5)) is None
    assert "in the same way" in (restarts.refuse(ERROR) or "")


def test_none_are_made_where_none_are_wanted() -> None:
    assert Restarts(most=0).refuse(KILL) == "run.restarts = 0"
