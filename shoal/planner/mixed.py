"""A job on devices of several kinds, such as of two generations: how many samples each takes, and what a step takes then.

Every rank runs as many micro-batches as any other, and a step ends with the slowest: so those of faster devices are larger
(`plan.shares`). What a sample takes on each kind is simulated once, sizes are chosen by it, and a step with them is simulated on
a rank of each kind. Collectives are as slow as the slowest kind's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.cost import Costs, Sureness, costs_of
from shoal.planner.extend import simulate_extended
from shoal.planner.memory import Fit, Memory, Verdict, judge, memory_of
from shoal.planner.profile import Profile
from shoal.planner.replay import Part, replay
from shoal.planner.timing import Timing, time_of
from shoal.planner.work import rates_without_data, work_of

MOST_SIZE = 16  # samples of a micro-batch, where the plan does not say
MOST_TIMES = 8  # of the micro-batch that the plan says
MOST_KINDS = 4
TRIES = 6  # sizes that are simulated until one fits, and of equal shares as well
Told = Callable[[str], None]


class Kind(NamedTuple):
    """Devices of one kind, and their ranks."""

    cluster: Cluster
    first: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.cluster.num_devices)


class OfKind(NamedTuple):
    """What ranks of one kind do and hold."""

    kind: Kind
    samples: int
    """of a micro-batch"""
    memory: Memory
    verdict: Verdict
    computing_s: float
    """of a step, in which the rank waits for nobody"""


class Mixed(NamedTuple):
    """What a plan needs on devices of several kinds."""

    plan: Plan
    kinds: list[OfKind]
    timing: Timing
    equal_s: float | None
    """a step in which each rank takes as many samples; None where the batch cannot be dealt out so, or it does not fit"""
    seconds: float
    """that the simulations took"""

    @property
    def fit(self) -> Fit:
        """Whether all fit."""
        fits = [each.verdict.fit for each in self.kinds]
        return next(fit for fit in (Fit.NOT, Fit.TIGHT, Fit.FITS) if fit in fits)


def parse_mixed(text: str) -> list[Kind]:
    """Clusters with + between them; ranks are numbered in their order.

    Raises:
        ValueError: one of them is not understood, or they cannot share a job.

    Example:
        >>> [(kind.cluster.describe(), kind.ranks) for kind in parse_mixed("2x8 h100 + 8 a100")]
        [('2x8 h100', range(0, 16)), ('8 a100', range(16, 24))]
    """
    kinds: list[Kind] = []
    for part in text.split("+"):
        cluster = Cluster.parse(part)
        kinds.append(Kind(cluster, kinds[-1].ranks.stop if kinds else 0))
    if len(kinds) > MOST_KINDS:
        raise ValueError(
            f"cluster = {text!r}: at most {MOST_KINDS} kinds; say devices of a kind together, such as '4x8 h100'"
        )
    if any(kind.cluster.host_gib is not None for kind in kinds):
        raise ValueError(f"cluster = {text!r}: host memory is not judged for several kinds; leave it out")
    if len({kind.cluster.device.type for kind in kinds}) > 1:
        raise ValueError(f"cluster = {text!r}: GPUs and CPUs do not share a job")
    return kinds


def together(kinds: Sequence[Kind], kind: Kind) -> Cluster:
    """A cluster of as many devices as all kinds have, all of one of them."""
    node = math.gcd(*(each.cluster.devices_per_node for each in kinds))
    nodes = sum(each.cluster.num_devices for each in kinds) // node
    return kind.cluster.model_copy(update={"nodes": nodes, "devices_per_node": node})


def predict_mixed(
    settings: Settings,
    plan: Plan,
    kinds: Sequence[Kind],
    *,
    expandable: bool = False,
    profile: Profile | None = None,
    tell: Told = lambda _: None,
) -> Mixed:
    """A step of a job on devices of several kinds, with shares by their speed unless the plan says them.

    Args:
        profile: of one of the kinds, from `shoal bench device`.

    Raises:
        ValueError: the plan does not fit the job or the devices.
    """
    began = time.perf_counter()
    _require_whole_groups(plan, kinds)
    if plan.world_size != sum(kind.cluster.num_devices for kind in kinds):
        check(settings.job, plan, together(kinds, kinds[0]))  # which says so
    looks = _Looks(settings, kinds, expandable, profile)
    if plan.shares:
        return looks.at(plan)._replace(seconds=time.perf_counter() - began)
    equal = _equal(plan, looks, tell)
    best = _best(plan, looks, tell)
    if equal is not None and (best.fit is Fit.NOT or equal.timing.seconds <= best.timing.seconds):
        best = equal
    equal_s = None if equal is None else equal.timing.seconds
    return best._replace(equal_s=equal_s, seconds=time.perf_counter() - began)


def _require_whole_groups(plan: Plan, kinds: Sequence[Kind]) -> None:
    if plan.pipeline > 1:
        raise ValueError(
            f"plan.pipeline = {plan.pipeline}: of several kinds of devices ranks take as many samples as they are fast, and "
            "stages of a pipeline are of equally many blocks; use other axes"
        )
    if plan.expert > 1:
        raise ValueError(
            f"plan.expert = {plan.expert}: rows that one kind gets from another are not simulated; use other axes"
        )
    group = plan.tensor * plan.context
    for kind in kinds:
        if kind.cluster.num_devices % group:
            raise ValueError(
                f"plan.tensor x plan.context = {group} ranks share samples, and {kind.cluster.describe()} is no whole number of "
                "such groups, so that one would have devices of two kinds"
            )


def _equal(plan: Plan, looks: _Looks, tell: Told) -> Mixed | None:
    """As many samples for each rank, the most at a time that fit; None where they cannot be dealt out so, or do not fit."""
    local, left = divmod(looks.settings.train.global_batch, plan.data_degree)
    most = plan.micro_batch or MOST_SIZE
    sizes = [size for size in range(min(local, most), 0, -1) if not left and local % size == 0]
    for size in sizes[:1] if plan.micro_batch else sizes[:TRIES]:
        try:
            found = looks.at(plan.model_copy(update={"micro_batch": size}))
        except ValueError:
            return None
        tell(f"equal shares, micro-batch {size}: {1e3 * found.timing.seconds:.1f} ms, {found.fit}")
        if found.fit is not Fit.NOT:
            return found
    return None


def _best(plan: Plan, looks: _Looks, tell: Told) -> Mixed:
    """The fastest sizes that fit, of those that come first by the times of a sample."""
    found: Mixed | None = None
    tried: set[tuple[int, ...]] = set()
    most = [MOST_TIMES * plan.micro_batch if plan.micro_batch else MOST_SIZE] * len(looks.kinds)
    for _ in range(TRIES):
        sizes = next(_sizes(plan, looks, most), None)
        if sizes is None or sizes in tried:
            break
        tried.add(sizes)
        found = looks.at(_with_sizes(plan, looks.kinds, sizes))
        tell(f"{found.plan.describe()}: {1e3 * found.timing.seconds:.1f} ms, {found.fit}")
        if found.fit is not Fit.NOT:
            return found
        most = [
            max(plan.micro_batch or 1, size // 2) if each.verdict.fit is Fit.NOT else limit
            for size, each, limit in zip(sizes, found.kinds, most, strict=True)
        ]
    if found is not None:
        return found
    degrees = [_groups(plan, kind) for kind in looks.kinds]
    raise ValueError(
        f"train.global_batch = {looks.settings.train.global_batch} is no whole number of micro-batches of up to {most} samples "
        f"for {' and '.join(map(str, degrees))} ranks; use another one"
    )


def _groups(plan: Plan, kind: Kind) -> int:
    """Ranks of a kind that read different samples."""
    return kind.cluster.num_devices // (plan.tensor * plan.context)


def _sizes(plan: Plan, looks: _Looks, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Samples of a micro-batch of each kind, those first with which a step's computing takes least; the smaller of equal ones."""
    batch, unit = looks.settings.train.global_batch, plan.micro_batch or 1
    degrees = [_groups(plan, kind) for kind in looks.kinds]
    found = []
    for sizes in product(*(range(unit, limit + 1, unit) for limit in most)):
        at_once = sum(degree * size for degree, size in zip(degrees, sizes, strict=True))
        if batch % at_once == 0:
            slowest = max(size * each for size, each in zip(sizes, looks.sample_s(plan), strict=True))
            found.append((batch // at_once * slowest, sum(sizes), sizes))
    yield from (sizes for _, _, sizes in sorted(found))


def _with_sizes(plan: Plan, kinds: Sequence[Kind], sizes: Sequence[int]) -> Plan:
    unit = math.gcd(*sizes)
    shares = [
        size // unit for size, kind in zip(sizes, kinds, strict=True) for _ in range(_groups(plan, kind))
    ]
    return Plan.model_validate(
        plan.model_dump(include=plan.model_fields_set)
        | {
            "replicate": plan.replicate,
            "micro_batch": unit,
            "shares": tuple(shares) if max(shares) > 1 else (),
        }
    )


class _Looks:
    """Simulations of one rank of each kind."""

    def __init__(
        self, settings: Settings, kinds: Sequence[Kind], expandable: bool, profile: Profile | None
    ) -> None:
        self.settings, self.kinds = settings, kinds
        self._clusters = [together(kinds, kind) for kind in kinds]
        self.cluster = self._clusters[0]
        own = [
            costs_of(
                cluster, profile if profile is not None and profile.device == cluster.device.kind else None
            )
            for cluster in self._clusters
        ]
        self._costs = [_SlowLinks(one, own) for one in own]
        self._expandable, self._work = expandable, work_of(settings)
        self._seen: dict[Plan, Mixed] = {}
        self._sample_s: list[float] = []

    def sample_s(self, plan: Plan) -> list[float]:
        """Seconds that a sample's forward and backward take on each kind."""
        if not self._sample_s:
            one = plan.model_copy(update={"micro_batch": plan.micro_batch or 1, "shares": ()})
            alone = self.settings.train.model_copy(
                update={"global_batch": one.data_degree * (one.micro_batch or 1)}
            )
            work = work_of(self.settings.model_copy(update={"train": alone}))
            for kind, cluster, costs in zip(self.kinds, self._clusters, self._costs, strict=True):
                trace = simulate_extended(work, one, cluster, kind.first)
                parts = replay({kind.first: trace}, costs).ranks[0].parts
                self._sample_s.append(_computing(parts) / (one.micro_batch or 1))
        return self._sample_s

    def at(self, plan: Plan) -> Mixed:
        """What a plan with sizes needs."""
        if plan not in self._seen:
            self._seen[plan] = self._at(plan)
        return self._seen[plan]

    def _at(self, plan: Plan) -> Mixed:
        check(self.settings.job, plan, self.cluster)
        count, unit = plan.micro_batches(self.settings.train.global_batch)
        kinds, timings = [], []
        for kind, cluster, costs in zip(self.kinds, self._clusters, self._costs, strict=True):
            trace = simulate_extended(self._work, plan, cluster, kind.first)
            memory = memory_of(trace, plan, cluster.device.type, expandable=self._expandable)
            recorded = len(self._work.batch(plan, kind.first, 0).micro_batches)
            rates = rates_without_data(self.settings, self._work, cluster)
            timing = time_of({kind.first: trace}, costs, rates, (count, recorded))
            share = plan.share(plan.data_rank(kind.first))[1]
            verdict = judge(memory, plan, cluster, expandable=self._expandable)
            kinds.append(OfKind(kind, share * unit, memory, verdict, _computing(timing.ranks[0].parts)))
            timings.append(timing)
        return Mixed(plan, kinds, self._slowest(timings), None, 0.0)

    def _slowest(self, timings: Sequence[Timing]) -> Timing:
        """The step of all, which is that of the slowest kind; its MFU is of the peaks of all devices."""
        slowest = max(timings, key=lambda timing: timing.seconds)
        wide = max(self._costs, key=lambda costs: costs.sureness.high).sureness
        return slowest._replace(
            low_s=slowest.seconds * (1 - wide.low),
            high_s=slowest.seconds * (1 + wide.high),
            why=_why([costs.sureness for costs in self._costs]),
            mfu=self._mfu(slowest, timings),
        )

    def _mfu(self, slowest: Timing, timings: Sequence[Timing]) -> float | None:
        counts = [kind.cluster.num_devices for kind in self.kinds]
        peaks = [kind.cluster.device.flops for kind in self.kinds]
        place = timings.index(slowest)
        own = peaks[place]
        if slowest.mfu is None or own is None or None in peaks:
            return None
        mean = sum(count * (peak or 0.0) for count, peak in zip(counts, peaks, strict=True)) / sum(counts)
        return slowest.mfu * own / mean


def _computing(parts: dict[Part, float]) -> float:
    return parts[Part.MATMUL] + parts[Part.ATTENTION] + parts[Part.MOVES]


def _why(sure: Sequence[Sureness]) -> str:
    return "; ".join(dict.fromkeys(one.why for one in sure))


class _SlowLinks(Costs):
    """Costs of one kind whose collectives, which ranks of all kinds take part in, are those of the slowest."""

    def __init__(self, own: Costs, kinds: Sequence[Costs]) -> None:
        vars(self).update(vars(own))
        self._kinds = [kind for kind in kinds if kind is not own]

    def collective(self, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        own = super().collective(kind, nbytes, ranks)
        return max([own, *(other.collective(kind, nbytes, ranks) for other in self._kinds)])
