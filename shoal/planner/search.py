"""`search`: the fastest plan of a job on a cluster that fits, by simulating those that may be it.

All sensible plans are enumerated. Those whose parameters, gradients and optimizer alone do not fit are out. The rest is ordered
by a guess, and simulated from the top, the best of each kind first, so that there is an answer to "why not copies, or tensor?",
until what is left is slower than the best by more than guesses are off. Where none fits, plans are tried that have the optimizer,
or parameters too, in host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.models.units import find_units
from shoal.parallel.initialise import build_on_meta
from shoal.plan import Plan
from shoal.planner.candidates import Base, Guess, guess, with_few_launches
from shoal.planner.cost import Costs, costs_of
from shoal.planner.extend import simulate_extended
from shoal.planner.memory import CONTEXT_BYTES, Category, Fit, most_of
from shoal.planner.pool import predictor
from shoal.planner.predict import Prediction
from shoal.planner.profile import Profile
from shoal.planner.replay import Part, replay
from shoal.planner.simulate import boundary_of
from shoal.planner.work import is_played, work_of

MOST = 24  # simulations of a search
AT_ONCE = 4  # simulations, before it is asked again which may still be the best
UNSURE = 0.08  # of a guess, beside what those of its kind were off
MEMORY_UNSURE = 1.5  # as much as a guess of memory was seen to be too large (70B without recompute: 1.4)
OFFLOADS = (("optimizer",), ("optimizer", "parameters"))  # where nothing fits without
LAST = 6  # simulations of plans with these
LIKELY = 1.15  # of a device's memory, by a guess: above, a plan is not simulated while others are left
Told = Callable[[str, int, int], None]


def measure_base(settings: Settings, cluster: Cluster, profile: Profile | None = None) -> Base:
    """Simulate one sample on one device, whether it fits or not.

    Raises:
        ValueError: the model cannot be built without storage, or has no blocks; or whatever training would raise.
    """
    one = cluster.model_copy(update={"nodes": 1, "devices_per_node": 1})
    alone = settings.model_copy(update={"train": settings.train.model_copy(update={"global_batch": 1})})
    work = work_of(alone)
    model = build_on_meta(work.build)
    units = find_units(model) if model is not None else []
    if model is None:
        raise ValueError(
            "the model cannot be built without storage (a tensor's values are asked for in its __init__), which a search needs; "
            "say a plan, such as plan.shard=8"
        )
    if not units:
        raise ValueError(
            "the model has no repeated blocks, from which a search guesses; say a plan, such as plan.shard=8"
        )
    plan = Plan(micro_batch=1)
    trace = simulate_extended(work, plan, one)
    step = replay({0: trace}, costs_of(one, profile)).ranks[0].parts
    boundary = boundary_of(work, plan, one, 0)
    return Base(
        sum(p.numel() for p in model.parameters()),
        max(sum(p.numel() for p in unit.module.parameters()) for unit in units),
        len(units),
        step[Part.MATMUL] + step[Part.ATTENTION] + step[Part.MOVES],
        most_of(trace, cluster.device.type, Category.ACTIVATIONS),
        math.prod(boundary.shape) * boundary.dtype.itemsize,
    )


class Rejected(NamedTuple):
    """A plan that is not an answer, and why."""

    plan: Plan
    why: str


class Found(NamedTuple):
    """What a search came to."""

    ranked: list[Prediction]
    """plans that fit, the fastest first; tight ones among them"""
    rejected: list[Rejected]
    """plans that were simulated and do not fit, or cannot run"""
    passed_over: list[Rejected]
    """plans that were not simulated, as slower by a guess or beyond the most; the best of each kind first"""
    considered: int
    """plans that the job's sizes allow"""
    too_large: int
    """of them, those whose states alone do not fit"""
    seconds: float

    @property
    def simulated(self) -> int:
        return len(self.ranked) + len(self.rejected)


def search(
    settings: Settings,
    cluster: Cluster,
    base: Base,
    *,
    profile: Profile | None = None,
    expandable: bool = False,
    most: int = MOST,
    tell: Told = lambda *_: None,
) -> Found:
    """The plans of a job on a cluster, ranked by the time of a step.

    Args:
        base: from `measure_base`.
        most: simulations at most.

    Raises:
        ValueError: no plan fits the job's sizes.
    """
    began = time.perf_counter()
    costs = costs_of(cluster, profile)
    memory = cluster.device.memory_bytes
    guesses = _guesses(settings, cluster, base, costs, [()])
    if not guesses:
        raise ValueError(
            f"no plan deals out train.global_batch = {settings.train.global_batch} to {cluster.num_devices} devices; use a "
            "multiple of them"
        )
    fitting = [each for each in guesses if states_fit(each, cluster)]
    looking = _Looking(in_order(fitting, memory), most, memory)
    expected = min(most, len(fitting)) or LAST
    with predictor(settings, expected, expandable=expandable, profile=profile) as ask:

        def look(expected: int) -> None:
            while wanted := looking.next_few():
                for index, result in ask([(each.plan, cluster) for each in wanted]):
                    looking.seen(wanted[index], result)
                    tell(wanted[index].plan.describe(), looking.simulated, expected)

        look(expected)
        if not looking.ranked and not (settings.plan and "offload" in settings.plan.model_fields_set):
            moved = _guesses(settings, cluster, base, costs, OFFLOADS)
            guesses += moved
            smaller = [each for each in moved if states_fit(each, cluster)]
            fitting += smaller
            looking.begin_again(in_order(smaller, memory), LAST)
            look(looking.simulated + min(LAST, len(smaller)))
    ranked = sorted(looking.ranked, key=lambda each: each.timing.seconds)
    return Found(
        ranked,
        looking.rejected,
        looking.passed_over(),
        len(guesses),
        len(guesses) - len(fitting),
        time.perf_counter() - began,
    )


class _Looking:
    """Plans in the order in which they are simulated, as long as one may be faster than the best that was found.

    The best of each kind comes first. How far guesses are from simulations is learned on the way, for each kind. Pipelines take
    longer to simulate: they come last, but take turns with the others while none was found that fits.
    """

    def __init__(self, order: Sequence[Guess], most: int, memory_bytes: int | None) -> None:
        self._left, self._most, self._memory = list(order), most, memory_bytes
        self.ranked: list[Prediction] = []
        self.rejected: list[Rejected] = []
        self._off: dict[str, float] = {}
        """by kind, the least that a simulation took of the time that was guessed"""
        self._leaner: dict[str, float] = {}
        """the same of the memory"""
        self._kinds: set[str] = set()
        self._passed: list[Guess] = []

    @property
    def simulated(self) -> int:
        return len(self.ranked) + len(self.rejected)

    def begin_again(self, order: Sequence[Guess], more: int) -> None:
        """Look among other plans, of which so many may be simulated; those that are left now are passed over."""
        self._passed += self._left
        self._left, self._most = list(order), self.simulated + min(more, len(order))

    def next_few(self) -> list[Guess]:
        """The plans to simulate next; none when the search is done."""
        first: list[Guess] = []
        for each in self._left:
            known = self._kinds | {one.kind for one in first}
            if each.plan.pipeline == 1 and each.kind not in known and not _unlikely(each, self._memory):
                first.append(each)
        may = [each for each in self._left if self._may_win(each)]
        may = [each for each in may if not self._kinds or self._lacks(each) <= 0]
        light = [each for each in may if each.plan.pipeline == 1]
        heavy = [each for each in may if each.plan.pipeline > 1]
        heavy.sort(key=lambda each: not is_played(each.plan))  # some take ten times as long to simulate
        next_ones = light[:AT_ONCE] or heavy[:AT_ONCE]
        if not self.ranked:
            likely = [[each for each in some if not _unlikely(each, self._memory)] for some in (light, heavy)]
            half = AT_ONCE // 2
            next_ones = [*likely[0][:half], *likely[1][:half]] or next_ones
        few = (first if first and not self._kinds else next_ones)[: self._most - self.simulated]
        for each in few:
            self._left.remove(each)
        return few

    def seen(self, guessed: Guess, result: Prediction | str) -> None:
        """A plan was simulated."""
        self._kinds.add(guessed.kind)
        if isinstance(result, str):
            self.rejected.append(Rejected(guessed.plan, result))
            return
        off = result.timing.seconds / guessed.step_s
        leaner = result.worst.memory.device_bytes / guessed.memory_bytes
        self._off[guessed.kind] = min(off, self._off.get(guessed.kind, off))
        self._leaner[guessed.kind] = min(leaner, self._leaner.get(guessed.kind, leaner))
        if result.fit is Fit.NOT:
            self.rejected.append(Rejected(guessed.plan, result.lack))
        else:
            self.ranked.append(result)

    def _at_best(self, each: Guess) -> float:
        """Seconds of a step: the guess, as far off as those of its kind, or as any other, were.

        Of a pipeline that is the least already: its guess has no messages.
        """
        off = self._off.get(each.kind, min(self._off.values(), default=1.0))
        return each.step_s * off * (1.0 if each.plan.pipeline > 1 else 1 - UNSURE)

    def _lacks(self, each: Guess) -> float:
        """Bytes that a device has too few, at least: the guess, as far off as those of its kind, or as any other, were."""
        off = min(1.0, self._leaner.get(each.kind, min(self._leaner.values(), default=1.0)))
        return each.memory_bytes * off / MEMORY_UNSURE - (self._memory or math.inf)

    def _may_win(self, each: Guess) -> bool:
        best = min((one.timing.seconds for one in self.ranked), default=math.inf)
        return self._at_best(each) < best

    def passed_over(self) -> list[Rejected]:
        """Plans that were not simulated, the best of each kind first, with what they may take."""
        told = sorted([*self._passed, *self._left], key=self._at_best)
        seen: dict[str, Guess] = {}
        for each in told:
            seen.setdefault(each.kind, each)
        first = list(seen.values())
        rest = [each for each in told if each is not seen[each.kind]]
        return [
            Rejected(each.plan, f"not simulated; by a guess {self._told(each)}") for each in (*first, *rest)
        ]

    def _told(self, each: Guess) -> str:
        if (lacks := self._lacks(each)) > 0:
            return f"it does not fit by {lacks / GIB:.1f} GiB at least"
        return f"{1e3 * self._at_best(each):,.0f} ms at best"


def _guesses(
    settings: Settings, cluster: Cluster, base: Base, costs: Costs, offloads: Sequence[tuple[str, ...]]
) -> list[Guess]:
    plans = (plan for offload in offloads for plan in with_few_launches(settings, cluster, base, offload))
    return [guess(plan, base, settings, costs) for plan in _distinct(plans)]


def _distinct(plans: Iterator[Plan]) -> list[Plan]:
    return list({repr(plan.model_dump()): plan for plan in plans}.values())


def states_fit(each: Guess, cluster: Cluster) -> bool:
    """Whether parameters, gradients and optimizer alone fit a device, and what of them is in host memory fits there."""
    memory, on_node = cluster.device.memory_bytes, each.host_bytes * cluster.devices_per_node
    if cluster.host_gib is not None and on_node > cluster.host_gib * GIB:
        return False
    return memory is None or each.state_bytes + CONTEXT_BYTES <= memory


def _unlikely(each: Guess, memory_bytes: int | None) -> bool:
    return memory_bytes is not None and each.memory_bytes > LIKELY * memory_bytes


def in_order(guesses: Sequence[Guess], memory_bytes: int | None) -> list[Guess]:
    """The best of each kind, then all others, each by time; plans that hardly fit last."""

    def rank(each: Guess) -> tuple[bool, float]:
        return _unlikely(each, memory_bytes), each.step_s

    best: dict[str, Guess] = {}
    ordered = sorted(guesses, key=rank)
    for each in ordered:
        best.setdefault(each.kind, each)
    likely = [each for each in best.values() if not rank(each)[0]]
    first = sorted(likely, key=rank)[: max(4, len(best) // 2)]
    chosen = {id(each) for each in first}
    return [*first, *(each for each in ordered if id(each) not in chosen)]
