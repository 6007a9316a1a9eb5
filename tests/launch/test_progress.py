"""What is too long without a move is learned from the run itself, and asked of steps alone."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

from shoal.launch.failure import End, is_compiling, main_stack
from shoal.launch.progress import STALL_S, Quiet
from shoal.launch.watch import Watch
from shoal.observe.status import Status


def ends(step: int, phase: str = "forward", ranks: int = 2) -> list[End]:
    return [
        End(rank, None, 0.0, Status(rank, 1, "node", step, phase, "running", 0.0, 0.0), None)
        for rank in range(ranks)
    ]


def test_fast_steps_may_rest_for_seconds_and_slow_ones_for_ten_times_a_step() -> None:
    for step_s, limit_s in ((0.1, STALL_S), (4.0, 40.0)):
        quiet = Quiet()
        for step in range(10):
            quiet.look(ends(step), 0.0, step * step_s)
        assert quiet.limit_s == limit_s
        quiet.look(ends(9), 9.0, 9 * step_s + 9.0)  # a stall makes no difference to what is too long
        assert quiet.limit_s == limit_s


def test_after_going_back_it_begins_anew() -> None:
    quiet = Quiet()
    for number, step in enumerate([*range(20, 30), *range(12, 18)]):
        quiet.look(ends(step), 0.0, number * 4.0)
    assert quiet.limit_s == 40.0


def test_the_first_steps_an_evaluation_and_a_save_are_not_judged() -> None:
    quiet = Quiet()
    quiet.look(ends(0, "setup"), 60.0, 60.0)
    assert quiet.limit_s == inf
    quiet.look(ends(0), 60.0, 120.0)
    quiet.look(ends(1), 60.0, 200.0)
    assert quiet.limit_s == inf
    quiet.look(ends(2), 0.0, 201.0)
    assert quiet.limit_s < inf
    for phase in ("eval", "save"):
        quiet.look(ends(2, phase), 0.0, 202.0)
        assert quiet.limit_s == inf


def test_a_rank_that_compiles_is_told_from_one_that_runs_what_was_compiled() -> None:
    run = 'File "/x/torch/_dynamo/eval_frame.py", line 1 in _fn\n  File "/x/torch/_functorch/_aot_autograd/a.py", line 2 in f'
    assert not is_compiling(run)
    assert is_compiling(f'File "/x/torch/_dynamo/convert_frame.py", line 3 in compile\n  {run}')
    deep = "Stack (most recent call first):\n" + '  File "/x/torch/_inductor/graph.py", line 4 in g\n' * 100
    assert is_compiling(main_stack(f"{deep}  ...\n"))


def test_a_stopped_process_is_found_after_some_time_and_looks_unless_its_rank_has_finished() -> None:
    nothing: Any = None
    running = [end._replace(stopped=end.rank == 1) for end in ends(3)]
    watch = Watch(nothing, nothing, nothing, 60.0, nothing, Path())
    assert not watch._stand_still(running)
    watch.stopped[1] = (1, watch.stopped[1][1] - 100.0)  # of a launcher that was suspended itself
    assert not watch._stand_still(running) and not watch._stand_still(running)
    assert watch._stand_still(running)
    assert not watch._stand_still(ends(3)) and not watch.stopped
    done = [end._replace(status=end.status and end.status._replace(state="finished")) for end in running]
    for _ in range(9):
        assert not watch._stand_still(done)
