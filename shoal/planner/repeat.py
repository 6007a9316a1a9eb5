"""The record of a longer model from that of a shorter one, event by event.

Each storage of a block has a home: the block, the pass (forward or backward of a micro-batch, set-up, update), its place in it.
A block frees what it allocated itself and what its neighbours did; a copy does the same to its own neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from shoal.planner.launch import Launch, Moment
from shoal.planner.trace import Storage, Trace

FAR = 2  # blocks: what is freed by one further away is not the rhythm's
NONE = -1  # no block
WIDE = 1 << 16  # more than a model has blocks


class NotPeriodicError(Exception):
    """A record's middle block cannot be repeated."""


class Run(NamedTuple):
    """Consecutive events of one block in one pass, or of none (-1)."""

    unit: int
    step: int
    kind: str
    occurrence: int
    """its number among those of the block in this pass"""
    events: list[int]
    """their indices in the trace"""


def extend(
    trace: Trace, kept: int, total: int, period: int = 1, *, first: int = 0, first_now: int = 0
) -> Trace:
    """The record of `total` blocks from that of `kept`, whose middle `period` blocks are repeated.

    Args:
        first: the number of the first block. first_now: in the longer record.

    Raises:
        NotPeriodicError: the middle blocks do not do what their neighbours do.
    """
    return _Extension(trace, kept, total - kept, period, (first, first_now)).made()


class _Extension:
    def __init__(self, trace: Trace, kept: int, copies: int, period: int, firsts: tuple[int, int]) -> None:
        self._trace, self._kept, self._copies, self._period = trace, kept, copies, period
        self._last = kept // 2 + period - 1 if copies else kept  # of those that are repeated
        self._names = _Names(trace, kept, *firsts)
        self._runs = self._cut()
        self._units: dict[int | Launch, int] = {}
        """of storages (by number) and launches: the block in which they began"""
        self._slots: dict[int | Launch, int] = {}
        """a number for the pass and the place in it in which they began"""
        self._find_homes()
        self._new = Trace()
        self._ids: dict[int, int] = {}
        """storages of the longer trace that are there, by their home: see `_emit`"""
        self._launched: dict[int, Launch] = {}

    def made(self) -> Trace:
        """The longer trace."""
        for index, run in enumerate(self._runs):
            if run.unit != self._last:
                self._emit(run, self._shifted(run.unit))
            elif self._ascends(index):
                self._emit(run, run.unit)
                self._emit_copies(index, range(1, self._copies + 1), -1)
            else:
                self._emit_copies(index, range(self._copies, 0, -1), 1)
                self._emit(run, run.unit)
        return self._new

    def _shifted(self, unit: int) -> int:
        return unit + self._copies if unit > self._last else unit

    def _emit_copies(self, index: int, numbers: range, direction: int) -> None:
        """Copies of the runs of the blocks that are repeated, which are neighbours in the record."""
        same = self._neighbours(index, direction)
        for number in numbers:
            run = same[(-number) % self._period]
            self._emit(run, self._last + number)

    def _neighbours(self, index: int, direction: int) -> list[Run]:
        """Runs of the repeated blocks in this pass, the last block's first."""
        found, at = [self._runs[index]], index
        while len(found) < self._period:
            at += direction
            if not 0 <= at < len(self._runs):
                raise NotPeriodicError
            run = self._runs[at]
            if run.unit == NONE:
                continue
            if run.unit != found[-1].unit - 1 or run.kind != found[0].kind:
                raise NotPeriodicError
            found.append(run)
        return found

    def _ascends(self, index: int) -> bool:
        """Whether the next block that does something in this pass is the next one in the model.

        Where blocks only let go of memory, another may do so before a neighbour: in which order does not matter then.
        """
        for run in self._runs[index + 1 :]:
            if run.unit not in (NONE, self._last):
                if abs(run.unit - self._last) != 1 and not self._only_lets_go(index):
                    break
                return run.unit > self._last
        raise NotPeriodicError

    def _only_lets_go(self, index: int) -> bool:
        """Whether nothing else happens from one neighbour's run to the next one's, between which this one is."""
        near = (self._last - 1, self._last + 1)
        begin, end = index, index
        while begin and self._runs[begin].unit not in near:
            begin -= 1
        while end < len(self._runs) - 1 and self._runs[end].unit not in near:
            end += 1
        events = (self._trace.events[at] for run in self._runs[begin : end + 1] for at in run.events)
        return all(isinstance(event, int) and event < 0 for event in events)

    def _cut(self) -> list[Run]:
        runs: list[Run] = []
        seen: dict[tuple[int, int, str], int] = defaultdict(int)
        for index in range(len(self._trace.events)):
            unit, moment = self._names.unit_of(index), self._trace.moments[index]
            kind = "backward" if moment.phase == "recompute" else moment.phase
            if runs and (runs[-1].unit, runs[-1].step, runs[-1].kind) == (unit, moment.step, kind):
                runs[-1].events.append(index)
                continue
            runs.append(Run(unit, moment.step, kind, seen[unit, moment.step, kind], [index]))
            seen[unit, moment.step, kind] += 1
        return runs

    def _find_homes(self) -> None:
        """Passes and places in them are numbered, the same for all blocks."""
        slots: dict[tuple[int, str, int, int], int] = {}
        for run in self._runs:
            for place, index in enumerate(run.events):
                event = self._trace.events[index]
                if isinstance(event, Launch) or event >= 0:
                    key = run.step, run.kind, run.occurrence, place
                    self._slots[event] = slots.setdefault(key, len(slots))
                    self._units[event] = run.unit

    def _places(self, old: int, new: int) -> list[int]:
        """For each block, by its place, and at the end for none: the one that it is for block `old`, which is now `new`: its
        neighbour still, or what it was at an end of the model.
        """
        near = [old != NONE and abs(other - old) <= FAR for other in range(self._kept)]
        return [*(new + other - old if near[other] else self._shifted(other) for other in range(self._kept)), NONE]  # fmt: skip

    def _emit(self, run: Run, unit: int) -> None:
        """A run's events as those of a block of the longer model.

        A home is one number, of the slot and the block; so many are made that a tuple for each takes a third of the time.
        """
        places = self._places(run.unit, unit)
        events, old, new = self._trace.events, self._trace.moments, self._new
        units, slots, ids = self._units, self._slots, self._ids
        moments: dict[Moment, Moment] = {}
        for index in run.events:
            event, moment = events[index], moments.get(old[index])
            if moment is None:
                moment = moments[old[index]] = self._names.renamed(old[index], places)
            if isinstance(event, Launch):
                self._launch(event, places, moment)
            elif event >= 0:
                home = slots[event] * WIDE + places[units[event]] + 1
                ids[home] = len(new.storages)
                new.events.append(ids[home])
                new.storages.append(self._copy(self._trace.storages[event], places, moment))
            else:
                found = ids.pop(slots[~event] * WIDE + places[units[~event]] + 1, None)
                if found is None:
                    raise NotPeriodicError
                new.storages[found].ended = moment
                new.events.append(~found)
            new.moments.append(moment)

    def _launch(self, launch: Launch, places: list[int], moment: Moment) -> None:
        """A launch, which waits for what its neighbours launched as it did before."""
        on = None
        if launch.on is not None:
            on = self._launched.get(self._slots[launch.on] * WIDE + places[self._units[launch.on]] + 1)
            if on is None:
                raise NotPeriodicError
        name = self._names.renamed_parameter(launch.name, places)
        made = launch.again(moment, name, launch.ranks, on)
        self._launched[self._slots[launch] * WIDE + places[self._units[launch]] + 1] = made
        self._new.events.append(made)

    def _copy(self, storage: Storage, places: list[int], began: Moment) -> Storage:
        return storage.again(began, self._names.renamed_parameter(storage.name, places))


class _Names:
    """Blocks by name and by place.

    Args:
        first: the number of the first one. first_now: the one that it gets.
    """

    def __init__(self, trace: Trace, kept: int, first: int = 0, first_now: int = 0) -> None:
        self._trace, self._first_now = trace, first_now
        units = {moment.unit for moment in trace.moments if moment.unit}
        prefixes = {unit.rpartition(".")[0] for unit in units}
        if len(prefixes) != 1:
            raise NotPeriodicError
        self._prefix = prefixes.pop()
        self._places = {f"{self._prefix}.{first + place}": place for place in range(kept)}
        if not units <= set(self._places):
            raise NotPeriodicError
        self._made_in: dict[int, int] = {}

    def at(self, unit: str) -> int:
        return self._places.get(unit, NONE)

    def unit_of(self, index: int) -> int:
        """The block of an event: in which it happens, or whose parameter it is about, or which made what it frees."""
        event = self._trace.events[index]
        unit = self.at(self._trace.moments[index].unit)
        if isinstance(event, Launch):
            if unit == NONE and not event.name and event.made >= 0:
                return self._owner(self._trace.storages[event.made].name)
            return unit if unit != NONE else self._owner(event.name)
        number = event if event >= 0 else ~event
        if unit == NONE:
            storage = self._trace.storages[number]
            unit = self._owner(storage.name)
            if event >= 0 and unit == NONE and not storage.nbytes and storage.ended is not None:
                unit = self.at(storage.ended.unit)  # stands for what the block will have
        if event >= 0:
            self._made_in[number] = unit
        return unit if unit != NONE else self._made_in[number]

    def _owner(self, name: str) -> int:
        if not name.startswith(f"{self._prefix}."):
            return NONE
        place = name[len(self._prefix) + 1 :].partition(".")[0]
        return self._places.get(f"{self._prefix}.{place}", NONE)

    def renamed(self, moment: Moment, places: list[int]) -> Moment:
        """A moment of the block that this one's is, as `places` say."""
        place = self.at(moment.unit)
        if place == NONE:
            return moment
        return moment._replace(unit=f"{self._prefix}.{self._first_now + places[place]}")

    def renamed_parameter(self, name: str, places: list[int]) -> str:
        """The parameter of the block that this one's is, as `places` say."""
        owner = self._owner(name) if name else NONE
        if owner == NONE:
            return name
        rest = name[len(self._prefix) + 1 :].partition(".")[2]
        return f"{self._prefix}.{self._first_now + places[owner]}.{rest}"
