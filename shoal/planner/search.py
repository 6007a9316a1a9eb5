"""`search`: the fastest plan of a job on a cluster that fits, by simulating those that may be it.

All sensible plans are enumerated. Those whose parameters, gradients and optimizer alone do not fit are out. The rest is ordered by
a guess, and simulated from the top, the best of each kind first, so that there is an answer to "why not copies, or tensor?".
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.candidates import Base, Guess, candidates, guess
from shoal.planner.cost import costs_of
from shoal.planner.memory import CONTEXT_BYTES, Fit
from shoal.planner.predict import Prediction, predict
from shoal.planner.profile import Profile

MOST = 24  # simulations of a search
LIKELY = 1.15  # of a device's memory, by a guess: above, a plan is not simulated while others are left
PROCESSES = max(1, min(8, (os.cpu_count() or 1)))
Told = Callable[[str, int, int], None]


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
    guesses = [guess(plan, base, settings, costs) for plan in _distinct(candidates(settings, cluster))]
    if not guesses:
        raise ValueError(
            f"no plan deals out train.global_batch = {settings.train.global_batch} to {cluster.num_devices} devices; use a "
            "multiple of them"
        )
    fitting = [each for each in guesses if _states_fit(each, cluster)]
    order = in_order(fitting, cluster.device.memory_bytes)[:most]
    ranked: list[Prediction] = []
    rejected: list[Rejected] = []
    for number, (plan, result) in enumerate(_simulated(order, settings, cluster, profile, expandable)):
        if isinstance(result, str):
            rejected.append(Rejected(plan, result))
        elif result.fit is Fit.NOT:
            margin = result.worst.verdict.margin_bytes or 0
            rejected.append(Rejected(plan, f"does not fit by {-margin / 2**30:.1f} GiB"))
        else:
            ranked.append(result)
        tell(plan.describe(), number + 1, len(order))
    ranked.sort(key=lambda each: each.timing.seconds)
    return Found(ranked, rejected, len(guesses), len(guesses) - len(fitting), time.perf_counter() - began)


def _distinct(plans: Iterator[Plan]) -> list[Plan]:
    return list({repr(plan.model_dump()): plan for plan in plans}.values())


def _states_fit(each: Guess, cluster: Cluster) -> bool:
    memory = cluster.device.memory_bytes
    return memory is None or each.state_bytes + CONTEXT_BYTES <= memory


def in_order(guesses: Sequence[Guess], memory_bytes: int | None) -> list[Guess]:
    """The best of each kind, then all others, each by time; plans that hardly fit last."""

    def rank(each: Guess) -> tuple[bool, float]:
        unlikely = memory_bytes is not None and each.memory_bytes > LIKELY * memory_bytes
        return unlikely, each.step_s

    best: dict[str, Guess] = {}
    ordered = sorted(guesses, key=rank)
    for each in ordered:
        best.setdefault(each.kind, each)
    first = sorted(best.values(), key=rank)[: max(4, len(best) // 2)]
    chosen = {id(each) for each in first}
    return [*first, *(each for each in ordered if id(each) not in chosen)]


def _simulated(
    order: Sequence[Guess], settings: Settings, cluster: Cluster, profile: Profile | None, expandable: bool
) -> Iterator[tuple[Plan, Prediction | str]]:
    """Predictions of plans as they are made, in processes of their own: a simulation changes what torch is."""
    left = list(order)
    if PROCESSES == 1 or len(left) <= 2:
        for each in left:
            yield each.plan, predicted(settings, each.plan, cluster, profile, expandable)
        return
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Prediction | str], Plan] = {}
        while left or running:
            while left and len(running) < PROCESSES:
                each = left.pop(0)
                running[pool.submit(predicted, settings, each.plan, cluster, profile, expandable)] = each.plan
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def predicted(
    settings: Settings, plan: Plan, cluster: Cluster, profile: Profile | None, expandable: bool
) -> Prediction | str:
    """A prediction, or why there is none. One plan that fails, even inside the user's model, does not end the others."""
    try:
        return predict(settings, plan, cluster, expandable=expandable, profile=profile)
    except ValueError as error:
        return (str(error).strip() or "ValueError").splitlines()[0]
    except Exception as error:
        return f"its simulation failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
