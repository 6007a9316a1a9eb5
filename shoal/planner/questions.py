"""Answers that take several predictions: the largest size that fits under a plan, the smallest cluster on which a job fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.candidates import Base, guess, with_few_launches
from shoal.planner.cost import costs_of
from shoal.planner.memory import Fit
from shoal.planner.pool import predict_or_say
from shoal.planner.predict import Prediction, predict
from shoal.planner.profile import Profile
from shoal.planner.search import states_fit

Size = Literal["micro_batch", "seq_len", "layers"]
SIZES: tuple[str, ...] = get_args(Size)
LENGTH_STEP = 1024  # tokens: lengths are tried in multiples of it
MOST_DOUBLINGS = 12
LEANEST = 2  # plans with the least memory, by a guess, of which one must fit for a cluster to be large enough
Told = Callable[[str], None]


class Largest(NamedTuple):
    """The largest value of a size that fits."""

    size: Size
    value: int | None
    """None if not even the smallest fits"""
    prediction: Prediction | None
    """at that value"""
    too_large: int | None
    """the smallest value that was seen not to fit; None if all that the job allows do"""


def largest(
    settings: Settings,
    plan: Plan,
    cluster: Cluster,
    size: Size,
    *,
    expandable: bool = False,
    profile: Profile | None = None,
    tell: Told = lambda _: None,
) -> Largest:
    """The largest micro-batch, sequence length or number of layers of a job that fits under a plan; the rest stays.

    Memory grows with each of them, so values are doubled and the gap is halved.

    Raises:
        ValueError: the plan does not fit the job; or the model's layers are no setting.
    """

    values = _values(settings, plan, size)
    fits, fails, best = -1, len(values), None  # places in values
    at = values.index(_now(settings, plan, size))
    while fails - fits > 1:
        found = predict(
            *_with(settings, plan, size, values[at]), cluster, expandable=expandable, profile=profile
        )
        tell(
            f"{size} {values[at]}: {found.lack or found.fit}, {found.worst.memory.device_bytes / GIB:.1f} GiB"
        )
        if found.fit is Fit.NOT:
            fails = at
        else:
            fits, best = at, found
        at = min(2 * fits + 1, fails - 1) if fails == len(values) else (fits + fails) // 2
    return Largest(
        size,
        values[fits] if fits >= 0 else None,
        best,
        values[fails] if fails < len(values) else None,
    )


def _values(settings: Settings, plan: Plan, size: Size) -> list[int]:
    """What can be tried, ascending."""
    if size == "micro_batch":
        local = settings.train.global_batch // plan.all_shares
        most = local // plan.pipeline  # a pipeline's micro-batches are as many as its ranks, at least
        return [value for value in range(1, most + 1) if local % value == 0]
    now = _now(settings, plan, size)
    step = 1
    if size == "seq_len":
        step = LENGTH_STEP if now % LENGTH_STEP == 0 else now
    return list(range(step, (now << MOST_DOUBLINGS) + 1, step))


def _now(settings: Settings, plan: Plan, size: Size) -> int:
    if size == "seq_len":
        return settings.data.seq_len
    if size == "layers":
        return _layers(settings)
    return plan.micro_batches(settings.train.global_batch)[1]


def _layers(settings: Settings) -> int:
    from shoal.models.moe_presets import resolve_moe
    from shoal.models.presets import resolve

    if settings.model.family == "llama":
        return resolve(settings.model).layers
    if settings.model.family == "moe":
        return resolve_moe(settings.model).base.layers
    raise ValueError(
        f"--largest layers needs a model whose layers are a setting (llama, moe), and model.family is {settings.model.family!r}"
    )


def _with(settings: Settings, plan: Plan, size: Size, value: int) -> tuple[Settings, Plan]:
    if size == "micro_batch":
        return settings, plan.model_copy(update={"micro_batch": value})
    table, key = ("data", "seq_len") if size == "seq_len" else ("model", "layers")
    changed = getattr(settings, table).model_copy(update={key: value})
    return settings.model_copy(update={table: changed}), plan


def smallest(
    settings: Settings,
    within: Cluster,
    base: Base,
    *,
    expandable: bool = False,
    profile: Profile | None = None,
    tell: Told = lambda _: None,
) -> Cluster | None:
    """The smallest part of a cluster on which some plan of a job fits: devices of a node, or whole nodes, each a power of two.

    On each, the plans that take the least memory by a guess are simulated, where their parameters, gradients and optimizer fit at
    all. None if there is no such part.
    """
    for cluster in parts_of(within):
        costs = costs_of(cluster, profile)
        guesses = [guess(plan, base, settings, costs) for plan in with_few_launches(settings, cluster, base)]
        lean = sorted(
            (each for each in guesses if states_fit(each, cluster)), key=lambda each: each.memory_bytes
        )
        # a pipeline takes longer to simulate: only where nothing else is as lean
        lean = sorted(lean[: 4 * LEANEST], key=lambda each: each.plan.pipeline > 1)[:LEANEST]
        if not lean:
            tell(
                f"{cluster.describe()}: parameters, gradients and optimizer do not fit, however they are cut"
            )
        for each in lean:
            found = predict_or_say(settings, each.plan, cluster, expandable, profile)
            told = found if isinstance(found, str) else found.lack or str(found.fit)
            tell(f"{cluster.describe()}: {each.plan.describe()}: {told}")
            if not isinstance(found, str) and found.fit is not Fit.NOT:
                return cluster
    return None


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """Devices of one node, then nodes: powers of two, and all.

    Example:
        >>> [part.describe() for part in parts_of(Cluster.parse("3x4 h100"))]
        ['1 h100', '2 h100', '4 h100', '2x4 h100', '3x4 h100']
    """
    for count in _doubling(cluster.devices_per_node):
        yield cluster.model_copy(update={"nodes": 1, "devices_per_node": count})
    for count in list(_doubling(cluster.nodes))[1:]:
        yield cluster.model_copy(update={"nodes": count})


def _doubling(most: int) -> Iterator[int]:
    yield from (1 << power for power in range(most.bit_length()) if 1 << power < most)
    yield most
