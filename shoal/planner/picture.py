"""`make_picture`: what devices hold under every sensible strategy and number of devices, as plain data that JSON can carry.

Each plan is simulated once, in a process of its own kind: a simulation changes what torch is for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.choose import Workload, with_graphs
from shoal.planner.memory import Category, Tensor
from shoal.planner.pool import first_line, predict_all
from shoal.planner.predict import Prediction, RankMemory
from shoal.planner.replay import Part
from shoal.planner.strategies import OWN, clusters_of, in_force, plan_of, strategies_of, words_of
from shoal.planner.timing import Timing

FORMAT = 1
SHORTEST = 0.0005  # of a step: shorter pieces of a timeline are not drawn

Told = Callable[[str, int, int], None]
"""What was simulated last, how many are done, and of how many."""

SAYS = {
    Category.PARAMETERS: "masters and buffers, this rank's part",
    Category.GATHERED: "whole parameters, while they are used",
    Category.GRADIENTS: "of this rank's part of the parameters, or of all",
    Category.OPTIMIZER: "AdamW's moments, or another optimizer's state",
    Category.ACTIVATIONS: "what forward keeps for backward",
    Category.TEMPORARIES: "what one operation gives to the next",
    Category.COMMUNICATION: "buffers that collectives read and write",
    Category.WORKSPACE: "what kernels take for themselves",
}


class Choice(NamedTuple):
    """A strategy on a number of devices, and the plan that it is, or the reason why it can't be."""

    strategy: str
    cluster: Cluster
    plan: Plan | None
    reason: str = ""


def make_picture(
    settings: Settings,
    cluster: Cluster,
    work: Workload,
    *,
    own: Prediction | None = None,
    expandable: bool = False,
    tell: Told = lambda *_: None,
) -> dict[str, Any]:
    """Simulate every sensible plan of a job on a cluster and on smaller ones like it.

    Args:
        work: how large the job is.
        own: of the person's plan, or of the one that is chosen; it is the first option.
        tell: called after each simulation.

    Returns:
        What `shoal.planner.page` draws. `options` has an entry for each strategy and number of devices. In it `reason` says
        why there is none; else `ranks` has the memory, and `step` and `timeline` the time, where that is known.
    """
    choices = choices_of(settings, cluster, work, own.plan if own else None)
    batch = settings.train.global_batch
    done = [own] if own else []
    found = dict(_simulated(_once(choices, batch, done), settings, expandable, tell))
    options = []
    for choice in choices:
        result: Prediction | str = choice.reason
        if choice.plan is not None:
            key = _key(choice.plan, choice.cluster, batch)
            same = next((each for each in done if _key(each.plan, each.cluster, batch) == key), None)
            result = same or found[key]
        options.append(option_of(choice, result, settings))
    return _described(settings, cluster, own) | {"options": options}


def choices_of(settings: Settings, cluster: Cluster, work: Workload, own: Plan | None) -> list[Choice]:
    """Every strategy on every number of devices, the person's own plan first."""
    clusters = clusters_of(cluster)
    micro_batch = _micro_batch(settings, own)
    choices = []
    if own is not None:
        others = [_own_elsewhere(own, part, cluster) for part in clusters[:-1]]
        choices += [*others, Choice(OWN, cluster, own)]
    for strategy in strategies_of(settings, cluster):
        for part in clusters:
            try:
                plan = plan_of(strategy, settings, part, micro_batch)
                plan = with_graphs(plan, work, part, settings.train.global_batch)
                check(settings.job, plan, part)
                choices.append(Choice(strategy.key, part, plan))
            except ValueError as error:
                choices.append(Choice(strategy.key, part, None, first_line(error)))
    return choices


def _own_elsewhere(own: Plan, part: Cluster, whole: Cluster) -> Choice:
    reason = f"this plan is for {whole.num_devices} devices: {own.describe()}"
    return Choice(OWN, part, None, reason)


def _micro_batch(settings: Settings, own: Plan | None) -> int:
    """Samples at a time, the same under all strategies, so that activations can be compared."""
    if settings.plan is not None and settings.plan.micro_batch is not None:
        return settings.plan.micro_batch
    return own.micro_batches(settings.train.global_batch)[1] if own is not None else 1


Key = tuple[str, str]


def _key(plan: Plan, cluster: Cluster, batch: int) -> Key:
    return repr(sorted(in_force(plan, batch).items())), cluster.describe()


def _once(
    choices: Sequence[Choice], batch: int, done: Sequence[Prediction]
) -> dict[Key, tuple[Plan, Cluster]]:
    """The plans that are to be simulated, each once."""
    wanted = {
        _key(choice.plan, choice.cluster, batch): (choice.plan, choice.cluster)
        for choice in choices
        if choice.plan is not None
    }
    had = {_key(each.plan, each.cluster, batch) for each in done}
    return {key: each for key, each in wanted.items() if key not in had}


def _simulated(
    wanted: dict[Key, tuple[Plan, Cluster]], settings: Settings, expandable: bool, tell: Told
) -> Iterator[tuple[Key, Prediction | str]]:
    """Predictions, or the reasons why there are none, in the order in which they are made."""
    order = sorted(wanted, key=lambda key: -wanted[key][0].pipeline)  # the longest first
    plans = [wanted[key] for key in order]
    for number, (index, result) in enumerate(predict_all(plans, settings, expandable=expandable)):
        plan, cluster = plans[index]
        yield order[index], result
        tell(f"{plan.describe()} on {cluster.describe()}", number + 1, len(plans))


def _described(settings: Settings, cluster: Cluster, own: Prediction | None) -> dict[str, Any]:
    said = settings.plan is not None and settings.plan.says_degrees
    strategies = [
        {"key": each.key, "name": each.name, "says": each.says} for each in strategies_of(settings, cluster)
    ]
    if own is not None:
        name = "Your plan" if said else "Chosen for you"
        strategies.insert(0, {"key": OWN, "name": name, "says": own.plan.describe()})
    model, train = settings.model, settings.train
    return {
        "format": FORMAT,
        "model": f"{model.family} {model.preset}" if model.preset else model.family,
        "work": f"{train.global_batch:,} samples of {settings.data.seq_len:,} tokens a step in {train.precision}",
        "cluster": cluster.describe(),
        "device": {"kind": cluster.device.kind, "memory_bytes": cluster.device.memory_bytes},
        "said": said,
        "strategies": strategies,
        "devices": [part.num_devices for part in clusters_of(cluster)],
        "categories": [{"key": each.value, "says": SAYS[each]} for each in Category],
    }


def option_of(choice: Choice, result: Prediction | str, settings: Settings) -> dict[str, Any]:
    """A choice and what came of it, as plain data. `step` and `timeline` are filled where time is predicted."""
    option: dict[str, Any] = {
        "strategy": choice.strategy,
        "devices": choice.cluster.num_devices,
        "cluster": choice.cluster.describe(),
        "plan": choice.plan.describe() if choice.plan else None,
        "words": words_of(choice.plan, settings) if choice.plan else None,
        "reason": None,
        "fit": None,
        "ranks": [],
        "step": None,
        "timeline": [],
    }
    if isinstance(result, str):
        return option | {"reason": result}
    return option | {
        "fit": result.fit.value,
        "ranks": [_rank_of(each) for each in result.ranks],
        "step": step_of(result.timing),
        "timeline": timeline_of(result.timing),
    }


def step_of(timing: Timing) -> dict[str, Any]:
    """A step's time as plain data, by the parts of the rank that waits least."""
    slowest = timing.slowest
    waits = (Part.EXPOSED, Part.BUBBLE, Part.HOST)
    return {
        "seconds": timing.seconds,
        "low_s": timing.low_s,
        "high_s": timing.high_s,
        "why": timing.why,
        "unit": timing.unit,
        "units_per_s": timing.units_per_s,
        "mfu": timing.mfu,
        "bound_by": timing.bound_by.value,
        "parts": {part.value: seconds for part, seconds in slowest.parts.items() if seconds > 0},
        "exposed_s": slowest.parts[Part.EXPOSED],
        "idle_s": sum(slowest.parts[part] for part in waits),
        "communication_s": slowest.communication_s,
        "micro_batches": timing.micro_batches[0],
    }


def timeline_of(timing: Timing) -> list[dict[str, Any]]:
    """What each rank does when, of as many micro-batches as were replayed."""
    spans = [span for rank in timing.ranks for span in rank.spans]
    return [
        span._asdict() | {"phase": "update" if span.phase == "reduce" else span.phase}
        for span in spans
        if span.end_s - span.begin_s > SHORTEST * timing.seconds
    ]


def _rank_of(each: RankMemory) -> dict[str, Any]:
    memory, peak = each.memory, each.memory.peak
    return {
        "rank": each.rank,
        "stands_for": each.stands_for,
        "by_category": {category.value: size for category, size in peak.by_category.items()},
        "allocated_bytes": peak.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "outside_bytes": memory.outside_bytes,
        "device_bytes": memory.device_bytes,
        "host_bytes": memory.host_bytes,
        "fit": each.verdict.fit.value,
        "margin_bytes": each.verdict.margin_bytes,
        "advice": list(each.verdict.advice),
        "moment": {"phase": peak.moment.phase, "unit": peak.moment.unit},
        "last": _tensor_of(peak.last),
        "largest": [_tensor_of(tensor) for tensor in peak.largest],
    }


def _tensor_of(tensor: Tensor) -> dict[str, Any]:
    return {
        "category": tensor.category.value,
        "nbytes": tensor.nbytes,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "made_by": tensor.made_by,
        "name": tensor.name,
    }
