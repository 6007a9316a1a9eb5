"""What a run of the campaign says is held against what was done to it."""

from __future__ import annotations

import pytest

from benchmarks.faults_judge import is_right, kinds_of
from benchmarks.faults_machines import Hit

GONE = "host b (process 12) is gone, with ranks 2, 3: it was not heard for 3 s"


def told(*messages: tuple[int, str]) -> list[dict[str, object]]:
    return [
        {"event": "start"},
        *({"event": "fault", "rank": rank, "message": text} for rank, text in messages),
    ]


@pytest.mark.parametrize(
    ("faults", "events", "hit", "right"),
    [
        ("kill rank=1 step=2", told((1, "rank 1 was killed by SIGKILL")), [], True),
        ("kill rank=1 step=2", told((0, "rank 0 is stuck")), [], False),
        ("kill rank=1 step=2", told((1, "rank 1 was killed by SIGKILL"), (0, "rank 0 is stuck")), [], False),
        ("kill rank=1 step=2", told(), [], False),  # nothing told is not right
        ("term rank=1 step=2", told(), [], True),  # an orderly stop is no fault
        ("halt node=2 step=2", told(), [Hit("halt", 12)], True),  # at its end before anybody saw it
        ("halt node=2 step=2", told((2, GONE)), [Hit("halt", 12)], True),
        ("halt node=1 step=2", told((2, GONE)), [Hit("halt", 11)], False),  # the healthy one is blamed
        ("cut node=1 step=2", told((2, GONE)), [Hit("cut", 11)], True),  # no side hears the other
        ("node rank=3 step=2", told((2, GONE)), [], True),
        ("node rank=1 step=2", told((2, GONE)), [], False),
        ("abort rank=1 step=3; halt node=2 step=4", told((3, "rank 3 is stuck")), [Hit("halt", 12)], False),
        ("parent rank=0 step=1", told((1, "the process that started the ranks ended")), [], True),
    ],
)
def test_what_is_told_is_held_against_what_was_done(
    faults: str, events: list[dict[str, object]], hit: list[Hit], right: bool
) -> None:
    struck = kinds_of(
        faults, [str(number) for number, part in enumerate(faults.split("; ")) if "rank=" in part]
    )
    assert is_right(faults, events, struck, hit) == right


def test_marks_of_a_run_are_numbers_of_ranks_faults_and_kinds_of_machines() -> None:
    faults = "cut node=1 step=1; kill rank=0 step=2; slow rank=1 step=3"
    assert kinds_of(faults, ["cut", "1", "0"]) == ["cut", "slow", "kill"]
