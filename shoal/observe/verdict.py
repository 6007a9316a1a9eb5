"""What ranks' last calls say when they are laid side by side: who did not come, who called something else, who is slow.

In a group the same number must be the same call. Where a rank has made fewer calls than another, it did not come to the next one;
unless it waits itself for a rank that did not come to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shoal.observe.calls import Call, Calls, Group, read_all_calls
from shoal.world.meeting import ranks_text


class Place(NamedTuple):
    """What a rank called, and where."""

    rank: int
    text: str
    line: str


class Mismatch(NamedTuple):
    """The first call of a group that is not the same on all its ranks; `rank` is the one that differs from most."""

    rank: int
    text: str


class Wait(NamedTuple):
    """A rank that made a call to which others did not come."""

    rank: int
    group: Group
    call: Call
    missing: tuple[int, ...]


class Absence(NamedTuple):
    """Ranks that did not come, and a line that says to what."""

    ranks: tuple[int, ...]
    text: str
    waiting: int
    """a rank that waits for them"""


def find_mismatch(calls: Mapping[int, Calls]) -> Mismatch | None:
    """The first difference between the ranks of some group, as far back as their files go."""
    found: list[tuple[float, Group, list[tuple[int, Call]]]] = []
    for group in groups_of(calls):
        differ = [made for made in numbered(group, calls).values() if len({call.sum for _, call in made}) > 1]
        if differ:
            made = min(differ, key=lambda made: made[0][1].number)
            found.append((min(call.time for _, call in made), group, made))
    if not found:
        return None
    _, group, made = min(found, key=lambda one: one[0])
    places = [Place(rank, call.text, call.line) for rank, call in made]
    odd = _odd(made, calls)
    return Mismatch(odd, mismatch_text(group, made[0][1].number, places, odd))


def find_absence(calls: Mapping[int, Calls], gone: Sequence[int] = ()) -> Absence | None:
    """The ranks that others wait for and that wait for nobody; None if no rank waits for a call of another.

    Args:
        gone: ranks that have ended, and so wait for nobody.
    """
    waits = {rank: wait for rank in calls if rank not in gone and (wait := _wait_of(rank, calls))}
    absent = sorted({other for wait in waits.values() for other in wait.missing if other not in waits})
    if absent:
        # rather the wait for it alone than one for ranks of which some wait for it themselves
        first = min(
            (wait for wait in waits.values() if absent[0] in wait.missing),
            key=lambda wait: (not set(wait.missing) <= set(absent), wait.call.time),
        )
        together = [rank for rank in first.missing if rank in absent]
        return Absence(tuple(together), _absence_text(together, first, waits), first.rank)
    for wait in waits.values():
        for other in wait.missing:
            if (back := waits[other]).group != wait.group and wait.rank in back.missing:
                ranks = _first_ever(wait, back, calls) or (other, wait.rank)
                return Absence(ranks, _circle_text(wait, back), wait.rank if ranks[0] == other else other)
    return None


def sure_mismatch(folder: Path, ranks: Sequence[int]) -> Mismatch | None:
    """As `find_mismatch`, in the files of ranks that may be writing: what is there when they are read again."""
    if find_mismatch(read_all_calls(folder, ranks)) is None:
        return None
    return find_mismatch(read_all_calls(folder, ranks))


def mismatch_text(group: Group, number: int, places: Sequence[Place], odd: int | None = None) -> str:
    """What ranks called that should have been one call, and where; `odd` is the rank that is told first, if one is."""
    said: dict[str, list[Place]] = {}
    for place in places:
        said.setdefault(place.text, []).append(place)
    each = [
        f"{ranks_text([place.rank for place in alike])} called {shown(text)} at {alike[0].line}"
        for text, alike in said.items()
    ]
    if len(said) == 1:
        each = [
            f"now all call {shown(places[0].text)} at {places[0].line}, and the first difference is no longer kept"
        ]
    which = (
        f"call {number} of {name_of(group)}" if len(said) > 1 else f"{name_of(group)} before call {number}"
    )
    who = "ranks made different calls" if odd is None else f"rank {odd} made another call than others"
    return f"{who}, in {which}:\n  " + ";\n  ".join(each)


def shown(text: str) -> str:
    """`all_reduce(sum) of float32 (4, 5)` of a call's text."""
    name, *rest = text.split(" ")
    if name == "transfer":
        return f"{name} {' '.join(rest)}"
    word = rest.pop(0) if name in ("all_reduce", "reduce_scatter", "reduce") and rest else ""
    if rest[:1] == ["root"]:
        word, rest = f"{word}{', ' if word else ''}root {rest[1]}", rest[2:]
    return name + (f"({word})" if word else "") + (f" of {' '.join(rest)}" if rest else "")


def name_of(group: Group) -> str:
    """`the shard group (ranks 0, 1)`."""
    kind = f"the {group.kind} group (" if group.kind else "the group of "
    return f"{kind}{ranks_text(group.ranks)}{')' if group.kind else ''}"


def groups_of(calls: Mapping[int, Calls]) -> list[Group]:
    """All groups in which some rank called something."""
    return list({name: group for one in calls.values() for name, group in one.groups.items()}.values())


def numbered(group: Group, calls: Mapping[int, Calls]) -> dict[int, list[tuple[int, Call]]]:
    """Each number of a group's calls with the ranks that made it."""
    found: dict[int, list[tuple[int, Call]]] = {}
    for rank in group.ranks:
        if rank in calls:
            for call in calls[rank].calls:
                if call.group == group.name:
                    found.setdefault(call.number, []).append((rank, call))
    return found


def _odd(made: Sequence[tuple[int, Call]], calls: Mapping[int, Calls]) -> int:
    """Which rank is to be looked at first: one of the fewest, or whose call has not come after such a call before."""
    ranks = Counter(call.text for _, call in made)
    fewest = min(ranks.values())
    usual = Counter(pair for one in calls.values() for pair in pairwise(call.text for call in one.calls))

    def is_usual(rank: int, call: Call) -> int:
        before = [other.text for other in calls[rank].calls if other.place == call.place - 1]
        return usual[before[0], call.text] if before else 0

    few = [(is_usual(rank, call), rank) for rank, call in made if ranks[call.text] == fewest]
    return min(few)[1]


def _wait_of(rank: int, calls: Mapping[int, Calls]) -> Wait | None:
    """What a rank waits for, if others have not come to what it called last."""
    mine = calls[rank]
    if not mine.calls:
        return None
    call = mine.calls[-1]
    group = mine.groups[call.group]
    if call.text.startswith(f"transfer {rank} to"):
        return None  # what is sent may be under way without its receiver
    missing = [
        other
        for other in group.ranks
        if other not in calls or calls[other].counts.get(group.name, 0) < call.number
    ]
    return Wait(rank, group, call, tuple(missing)) if missing else None


def _absence_text(absent: Sequence[int], wait: Wait, waits: Mapping[int, Wait]) -> str:
    here = [w.rank for w in waits.values() if (w.group, w.call.number) == (wait.group, wait.call.number)]
    return (
        f"{ranks_text(absent)} did not come to {shown(wait.call.text)}, call {wait.call.number} of {name_of(wait.group)}; "
        f"{ranks_text(sorted(here))} {'wait' if len(here) > 1 else 'waits'} there, at {wait.call.line}"
    )


def _first_ever(one: Wait, other: Wait, calls: Mapping[int, Calls]) -> tuple[int, ...]:
    """Which of two ranks that wait for each other made a call that nobody has made before; none if that is not one of them."""
    made = Counter(call.text for of_rank in calls.values() for call in of_rank.calls)
    new = [wait.rank for wait in (one, other) if made[wait.call.text] == 1]
    return tuple(new) if len(new) == 1 else ()


def _circle_text(one: Wait, other: Wait) -> str:
    said = [
        f"rank {wait.rank} waits in {shown(wait.call.text)} of {name_of(wait.group)}, at {wait.call.line}"
        for wait in (one, other)
    ]
    return f"{said[0]}; {said[1]}: each for the other, so they made their calls in another order"
