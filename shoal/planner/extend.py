"""A deep model from a shallow one: most blocks of a model are alike, so a few are simulated and the middle one is repeated.

What is repeated is the record of the step, event by event, and not a number: so peaks, and what the allocator makes of them, are
those of the deep model. Each storage of a block has a home: the block, the pass (forward or backward of a micro-batch, set-up,
update) and its place in it. A block frees what it allocated itself and what its neighbours did; a copy does the same to its own
neighbours. Where a record does not repeat so, the whole model is simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.cluster import Cluster
from shoal.parallel.initialise import build_on_meta
from shoal.parallel.units import Unit, find_units
from shoal.plan import Plan
from shoal.planner.fake_device import outside
from shoal.planner.launch import Launch, Moment
from shoal.planner.simulate import Work, simulate
from shoal.planner.trace import Storage, Trace

KEPT = 6  # blocks: with fewer, prefetching and offload do not come to their rhythm
FAR = 2  # blocks: what is freed by one further away is not the rhythm's


class NotPeriodicError(Exception):
    """A record's middle block cannot be repeated."""


def simulate_extended(work: Work, plan: Plan, cluster: Cluster, rank: int = 0) -> Trace:
    """As `simulate`, of few blocks where that gives the same."""
    total = _alike_blocks(work) if _repeats(plan) else 0
    period = plan.recompute_every
    kept = KEPT + 2 * (period - 1)
    kept += (total - kept) % period
    if total <= kept:
        return simulate(work, plan, cluster, rank)
    shallow = simulate(work._replace(build=_shortened(work.build, kept)), plan, cluster, rank)
    try:
        return extend(shallow, kept, total, period)
    except NotPeriodicError:
        return simulate(work, plan, cluster, rank)


def _repeats(plan: Plan) -> bool:
    """Whether memory is had block by block: copies are sent, and moments moved, in pieces that do not end where blocks do."""
    copies = plan.only_copies and plan.replicate > 1
    return plan.pipeline == 1 and not copies and not {"optimizer", "parameters"} & set(plan.offload)


def _alike_blocks(work: Work) -> int:
    """How many blocks a model has in one list that are all alike; 0 if they are not, or it cannot be built without storage."""
    model = build_on_meta(work.build)
    units = find_units(model) if model is not None else []
    if len({unit.name.rpartition(".")[0] for unit in units}) != 1 or model is None:
        return 0
    container = model.get_submodule(units[0].name.rpartition(".")[0])
    if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) != len(units):
        return 0
    first = _signature(units[0])
    return len(units) if all(_signature(unit) == first for unit in units[1:]) else 0


def _signature(unit: Unit) -> list[Any]:
    """What a block is made of; two with the same compute the same on inputs of the same shape."""
    found: list[Any] = []
    for name, module in unit.module.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, str | bool | int | float | tuple) and "idx" not in key and "index" not in key
        }
        tensors = [(key, tuple(t.shape), t.dtype) for key, t in module.named_parameters(recurse=False)]
        found.append((name, type(module), sorted(plain.items(), key=lambda item: item[0]), tensors))
    return found


def _shortened(build: Callable[[], nn.Module], kept: int) -> Callable[[], nn.Module]:
    """A builder of the model with its first blocks alone; it is built outside of the simulated world, which takes less time."""

    def shorter() -> nn.Module:
        with outside():
            model = build_on_meta(build)
        if model is None:
            raise NotPeriodicError
        container: Any = model.get_submodule(find_units(model)[0].name.rpartition(".")[0])
        del container[kept:]
        return model._apply(_anew)

    return shorter


@torch.no_grad()
def _anew(tensor: Tensor) -> Tensor:
    """A tensor of the world that one is in, like one from elsewhere."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class Home(NamedTuple):
    """Where a storage was allocated: the block, the pass, the pass's number among those of its kind, the place in it."""

    unit: int
    step: int
    kind: str
    occurrence: int
    place: int


class Run(NamedTuple):
    """Consecutive events of one block in one pass, or of none (-1)."""

    unit: int
    step: int
    kind: str
    occurrence: int
    events: list[int]
    """their indices in the trace"""


NONE = -1


def extend(trace: Trace, kept: int, total: int, period: int = 1) -> Trace:
    """The record of `total` blocks from that of `kept`, whose middle `period` blocks are repeated.

    Raises:
        NotPeriodicError: the middle blocks do not do what their neighbours do.
    """
    return _Extension(trace, kept, total - kept, period).made()


class _Extension:
    def __init__(self, trace: Trace, kept: int, copies: int, period: int) -> None:
        self._trace, self._kept, self._copies, self._period = trace, kept, copies, period
        self._last = kept // 2 + period - 1  # of those that are repeated
        self._names = _Names(trace, kept)
        self._runs = self._cut()
        self._homes = self._find_homes()
        self._new = Trace()
        self._ids: dict[Home, int] = {}
        self._launched: dict[Home, Launch] = {}

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
        """Whether the next block that does something in this pass is the next one in the model."""
        for run in self._runs[index + 1 :]:
            if run.unit not in (NONE, self._last):
                if abs(run.unit - self._last) != 1:
                    break
                return run.unit > self._last
        raise NotPeriodicError

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

    def _find_homes(self) -> dict[int | Launch, Home]:
        homes: dict[int | Launch, Home] = {}
        for run in self._runs:
            for place, index in enumerate(run.events):
                event = self._trace.events[index]
                if isinstance(event, Launch) or event >= 0:
                    homes[event] = Home(run.unit, run.step, run.kind, run.occurrence, place)
        return homes

    def _emit(self, run: Run, unit: int) -> None:
        """A run's events as those of a block of the longer model."""
        for index in run.events:
            event, moment = self._trace.events[index], self._trace.moments[index]
            moment = self._names.renamed(moment, self._moved(self._names.at(moment.unit), run.unit, unit))
            if isinstance(event, Launch):
                self._launch(event, run.unit, unit, moment)
                continue
            number = event if event >= 0 else ~event
            home = self._home(number, run.unit, unit)
            if event >= 0:
                self._ids[home] = len(self._new.storages)
                self._new.storages.append(self._copy(self._trace.storages[number], run.unit, unit, moment))
                self._new.events.append(self._ids[home])
            else:
                if home not in self._ids:
                    raise NotPeriodicError
                found = self._ids.pop(home)
                self._new.storages[found].ended = moment
                self._new.events.append(~found)
            self._new.moments.append(moment)

    def _launch(self, launch: Launch, old: int, new: int, moment: Moment) -> None:
        """A launch of block `old`, now `new`, which waits for what its neighbours launched as it did before."""
        on = None
        if launch.on is not None:
            on = self._launched.get(self._home(launch.on, old, new))
            if on is None:
                raise NotPeriodicError
        name = self._names.renamed_parameter(launch.name, lambda unit: self._moved(unit, old, new))
        made = replace(launch, moment=moment, name=name, on=on)
        self._launched[self._home(launch, old, new)] = made
        self._new.events.append(made)
        self._new.moments.append(moment)

    def _home(self, about: int | Launch, old: int, new: int) -> Home:
        """The home in the longer model of what an event of block `old`, now `new`, is about."""
        home = self._homes[about]
        return home._replace(unit=self._moved(home.unit, old, new))

    def _moved(self, other: int, old: int, new: int) -> int:
        """The block that another one is, for a block that moved: its neighbour still, or what it was at an end of the model."""
        if other == NONE:
            return NONE
        return new + other - old if old != NONE and abs(other - old) <= FAR else self._shifted(other)

    def _copy(self, storage: Storage, old: int, new: int, began: Moment) -> Storage:
        name = self._names.renamed_parameter(storage.name, lambda unit: self._moved(unit, old, new))
        return replace(storage, began=began, ended=None, name=name)


class _Names:
    """Blocks by name and by place."""

    def __init__(self, trace: Trace, kept: int) -> None:
        self._trace = trace
        units = {moment.unit for moment in trace.moments if moment.unit}
        prefixes = {unit.rpartition(".")[0] for unit in units}
        if len(prefixes) != 1:
            raise NotPeriodicError
        self._prefix = prefixes.pop()
        self._places = {f"{self._prefix}.{place}": place for place in range(kept)}
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
            unit = self._owner(self._trace.storages[number].name)
        if event >= 0:
            self._made_in[number] = unit
        return unit if unit != NONE else self._made_in[number]

    def _owner(self, name: str) -> int:
        if not name.startswith(f"{self._prefix}."):
            return NONE
        place = name[len(self._prefix) + 1 :].partition(".")[0]
        return self._places.get(f"{self._prefix}.{place}", NONE)

    def renamed(self, moment: Moment, place: int) -> Moment:
        return moment if place == NONE else moment._replace(unit=f"{self._prefix}.{place}")

    def renamed_parameter(self, name: str, moved: Callable[[int], int]) -> str:
        owner = self._owner(name)
        if owner == NONE:
            return name
        rest = name[len(self._prefix) + 1 :].partition(".")[2]
        return f"{self._prefix}.{moved(owner)}.{rest}"
