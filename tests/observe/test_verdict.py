"""Laid side by side, calls name who did not come, who called something else and who is slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.observe.calls import Call, Calls, Group
from shoal.observe.pace import WINDOW_STEPS, WINDOWS, Pace, Slow
from shoal.observe.verdict import find_absence, find_mismatch, name_of, shown

SUM = "all_reduce sum float32 (4,)"
GATHER = "all_gather float32 (2,)"
WORLD = Group("0", "", (0, 1, 2, 3))
LEFT, RIGHT = Group("1", "shard", (0, 1)), Group("2", "shard", (2, 3))
ACROSS = Group("3", "replicate", (1, 3))


def made(*calls: tuple[Group, str], times: Sequence[float] | None = None) -> Calls:
    """What a rank called, in this order."""
    counts: dict[str, int] = {}
    found, total = [], {}
    for place, (group, text) in enumerate(calls, start=1):
        counts[group.name] = counts.get(group.name, 0) + 1
        total[group.name] = hash((total.get(group.name), text))
        time = times[place - 1] if times else float(place)
        found.append(
            Call(place, group.name, counts[group.name], time, total[group.name], text, f"f.py:{place} in f")
        )
    return Calls({group.name: group for group, _ in calls}, counts, found)


def test_a_rank_with_fewer_calls_did_not_come() -> None:
    calls = {rank: made((WORLD, SUM), (WORLD, GATHER)) for rank in (0, 1, 3)} | {2: made((WORLD, SUM))}
    absence = find_absence(calls)
    assert absence is not None
    assert absence.ranks == (2,)
    assert absence.text == (
        "rank 2 did not come to all_gather of float32 (2,), call 2 of the group of ranks 0, 1, 2, 3; "
        "ranks 0, 1, 3 wait there, at f.py:2 in f"
    )


def test_a_rank_that_waits_itself_is_not_the_one() -> None:
    """Rank 1 did not come to its neighbour 0, since it waits for 3; that one is the cause."""
    calls = {
        0: made((LEFT, GATHER), (LEFT, SUM)),
        1: made((LEFT, GATHER), (ACROSS, SUM)),
        2: made((RIGHT, GATHER), (RIGHT, SUM)),
        3: made((RIGHT, GATHER)),
    }
    absence = find_absence(calls)
    assert absence is not None
    assert absence.ranks == (3,)
    assert find_absence({0: calls[0], 1: calls[0]}) is None  # both came to all


@pytest.mark.parametrize("late_s", [0.0, 9.0])
def test_of_those_who_wait_the_one_is_told_that_waits_for_nobody_else(late_s: float) -> None:
    """Rank 1 did not come to its neighbour 0, and so neither came to ranks 2 and 3, which may have waited for longer."""
    calls = {
        0: made((LEFT, GATHER), (LEFT, SUM), times=[1.0, 2.0 + late_s]),
        1: made((LEFT, GATHER)),
        2: made((RIGHT, GATHER), (RIGHT, SUM), (WORLD, SUM), times=[1.0, 2.0, 3.0]),
        3: made((RIGHT, GATHER), (RIGHT, SUM), (WORLD, SUM), times=[1.0, 2.0, 3.0]),
    }
    absence = find_absence(calls)
    assert absence is not None
    assert (absence.ranks, absence.waiting) == ((1,), 0)
    assert "rank 1 did not come to all_reduce(sum) of float32 (4,), call 2 of the shard group" in absence.text


def test_ranks_that_wait_for_each_other_in_two_groups_have_another_order() -> None:
    other = Group("9", "replicate", (0, 1))
    absence = find_absence({0: made((LEFT, SUM)), 1: made((other, GATHER))})
    assert absence is not None
    assert absence.ranks == (1, 0)
    assert "rank 0 waits in all_reduce(sum) of float32 (4,) of the shard group (ranks 0, 1)" in absence.text
    assert "rank 1 waits in all_gather of float32 (2,) of the replicate group (ranks 0, 1)" in absence.text


def test_of_two_that_wait_for_each_other_the_one_that_does_what_nobody_did_before_is_named() -> None:
    other, both = Group("9", "replicate", (0, 1)), Group("0", "", (0, 1))
    extra = (both, "all_reduce max float32 (3,)")
    usual = [(LEFT, SUM), (other, GATHER)]
    absence = find_absence({0: made(*usual, *usual, extra), 1: made(*usual, *usual, (LEFT, SUM))})
    assert absence is not None
    assert absence.ranks == (0,)
    assert "rank 1 waits in all_reduce(sum) of float32 (4,) of the shard group (ranks 0, 1)" in absence.text


def test_one_that_sends_does_not_wait_and_one_that_receives_does() -> None:
    pair = Group("0/0>1", "", (0, 1))
    sent = (pair, "transfer 0 to 1 float32 (4,)")
    assert find_absence({0: made(sent), 1: made((LEFT, SUM))}) is not None  # 0 did not come to the sum
    absence = find_absence({0: made((LEFT, SUM)), 1: made((LEFT, SUM), sent)})
    assert absence is not None
    assert absence.text.startswith("rank 0 did not come to transfer 0 to 1 float32 (4,)")


def test_the_first_other_call_is_told_with_the_rank_that_differs_from_most() -> None:
    calls = {rank: made((WORLD, SUM), (WORLD, GATHER), (WORLD, SUM)) for rank in (0, 1, 3)}
    calls[2] = made((WORLD, SUM), (WORLD, "all_gather int32 (2,)"), (WORLD, SUM))
    assert find_mismatch({0: calls[0], 1: calls[1]}) is None
    found = find_mismatch(calls)
    assert found is not None
    assert found.rank == 2
    first, most, odd = found.text.splitlines()
    assert first == "rank 2 made another call than others, in call 2 of the group of ranks 0, 1, 2, 3:"
    assert most == "  ranks 0, 1, 3 called all_gather of float32 (2,) at f.py:2 in f;"
    assert odd == "  rank 2 called all_gather of int32 (2,) at f.py:2 in f"


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_the_one_that_left_its_usual_order_is_named(wrong: int) -> None:
    usual = [(LEFT, GATHER), (LEFT, SUM), (LEFT, "barrier")]
    calls = {0: made(*usual * 3), 1: made(*usual * 3)}
    calls[wrong] = made(*usual * 2, *usual[1:])  # it left one out
    found = find_mismatch(calls)
    assert found is not None
    assert found.rank == wrong


def test_a_difference_that_is_no_longer_kept_is_still_found() -> None:
    calls = {0: made((LEFT, SUM), (LEFT, SUM)), 1: made((LEFT, GATHER), (LEFT, SUM))}
    kept = {rank: one._replace(calls=one.calls[1:]) for rank, one in calls.items()}
    found = find_mismatch(kept)
    assert found is not None
    assert "in the shard group (ranks 0, 1) before call 2" in found.text


def test_calls_are_shown_as_people_write_them() -> None:
    assert shown("reduce sum root 3 float32 (4,)") == "reduce(sum, root 3) of float32 (4,)"
    assert shown("broadcast root 0 int64 (2, 3)") == "broadcast(root 0) of int64 (2, 3)"
    assert shown("barrier") == "barrier"
    assert name_of(ACROSS) == "the replicate group (ranks 1, 3)"


def paced(late_s: dict[int, float], data_s: dict[int, float], windows: int) -> list[Slow]:
    """What is said of four ranks that step together, of which some come late to each call."""
    pace = Pace([range(4)])
    said = []
    for window in range(windows + 1):
        start = window * WINDOW_STEPS
        times = [float(step) for step in range(start + 1)]
        calls = {
            rank: made(*[(WORLD, SUM)] * len(times), times=[t + late_s.get(rank, 0.0) for t in times])
            for rank in range(4)
        }
        waited = {rank: seconds * start for rank, seconds in data_s.items()}
        said += pace.look(calls, start, float(start), waited)
    return said


def test_a_rank_for_which_others_wait_in_every_window_is_told_once_with_the_reason() -> None:
    (slow,) = paced({2: 0.5}, dict.fromkeys(range(4), 0.1), windows=WINDOWS + 3)
    assert (slow.rank, slow.reason) == (2, "its own work takes longer")
    assert slow.ratio == pytest.approx(2.0, rel=0.1)
    (slow,) = paced({2: 0.5}, {0: 0.1, 1: 0.1, 2: 0.5, 3: 0.1}, windows=WINDOWS)
    assert slow.reason == "it waits for its data"


def test_a_rank_that_is_a_little_late_or_late_for_a_while_is_not_told_of() -> None:
    assert paced({2: 0.2}, {}, windows=10) == []
    assert paced({2: 0.5}, {}, windows=WINDOWS - 1) == []
