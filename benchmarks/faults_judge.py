"""Whether what a run of the campaign (faults.py) said names what was done to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.faults_machines import Hit, read_blows

# a machine whose launcher stands still, or that cannot be reached, may be at its end before that is seen
ENDS_RANKS = [
    "kill",
    "crash",
    "abort",
    "exit",
    "raise",
    "memory",
    "disk",
    "parent",
    "node",
    "hang",
    "stop",
    "extra",
]
"""kinds by which a rank ends or goes on no more, and of which a run has to tell"""
GONE = re.compile(r"\(process (\d+)\) is gone, with (ranks? .*?):")


def is_right(
    faults: str, events: Iterable[dict[str, Any]], struck: Sequence[str], hit: Sequence[Hit]
) -> bool:
    """Whether every fault that was told is one that was made, and one was told if a rank was ended.

    Args:
        faults: as the campaign has them.
        events: of the run.
        struck: kinds of those that were made, as far as the run got.
        hit: what was done to machines from outside.
    """
    told = [event for event in events if event["event"] == "fault"]
    ranks = [int(rank) for rank in re.findall(r"rank=(\d+)", faults)]
    with_machines = [int(rank) for rank in re.findall(r"node rank=(\d+)", faults)]
    if any(kind in ENDS_RANKS for kind in struck) and not told:
        return False
    return all(
        event["rank"] in ranks
        or "the process that started" in event["message"]
        or _is_a_lost_machine(event["message"], with_machines, hit)
        for event in told
    )


def kinds_of(faults: str, struck: Iterable[str]) -> list[str]:
    """Of a run's marks, which are numbers of ranks' faults and kinds of machines', the kinds."""
    ours = [part.split()[0] for part in read_blows(faults)[0].split("; ") if part]
    return [ours[int(what)] if what.isdigit() else what for what in struck]


def _is_a_lost_machine(message: str, with_machines: Sequence[int], hit: Sequence[Hit]) -> bool:
    """A machine whose launcher was killed or stood still, or any where a cable was pulled: no side hears the other then."""
    found = GONE.search(message)
    if found is None:
        return False
    if any(blow.kind in ("cut", "blip") for blow in hit) or int(found[1]) in {blow.pid for blow in hit}:
        return True
    return bool({int(rank) for rank in re.findall(r"\d+", found[2])}.intersection(with_machines))
