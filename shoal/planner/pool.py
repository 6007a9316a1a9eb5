"""Predictions of several plans, in processes of their own: a simulation changes what torch is for the whole process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager

from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.predict import Prediction, predict
from shoal.planner.profile import Profile

FEW = 4  # simulations that take less time than a second process takes to import torch
MOST_PROCESSES = 8  # a simulation of 8B parameters takes about 1 GiB of host memory and one core


Wanted = Sequence[tuple[Plan, Cluster]]
Predictor = Callable[[Wanted], Iterator[tuple[int, Prediction | str]]]


def predict_all(
    wanted: Wanted, settings: Settings, *, expandable: bool = False, profile: Profile | None = None
) -> Iterator[tuple[int, Prediction | str]]:
    """Predictions by their index, or the reasons why there are none, as they are made."""
    with predictor(settings, len(wanted), expandable=expandable, profile=profile) as ask:
        yield from ask(wanted)


@contextmanager
def predictor(
    settings: Settings, expected: int, *, expandable: bool = False, profile: Profile | None = None
) -> Iterator[Predictor]:
    """Gives what predicts plans as `predict_all`, any number of times by the same processes.

    Args:
        expected: plans in all, by which it is decided whether processes are worth their start.
    """
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ExitStack() as stack:
        pools: list[ProcessPoolExecutor] = []

        def ask(wanted: Wanted) -> Iterator[tuple[int, Prediction | str]]:
            if expected <= FEW or processes == 1:
                for index, (plan, cluster) in enumerate(wanted):
                    yield index, predict_or_say(settings, plan, cluster, expandable, profile)
                return
            if not pools:  # spawned: a process with torch's threads cannot be forked
                pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
                pools.append(stack.enter_context(pool))
            futures = {
                pools[0].submit(predict_or_say, settings, plan, cluster, expandable, profile): index
                for index, (plan, cluster) in enumerate(wanted)
            }
            for future in as_completed(futures):
                yield futures[future], future.result()

        yield ask


def predict_or_say(
    settings: Settings, plan: Plan, cluster: Cluster, expandable: bool = False, profile: Profile | None = None
) -> Prediction | str:
    """A prediction, or why there is none. One plan that fails, even inside the user's model, does not end the others."""
    try:
        return predict(settings, plan, cluster, expandable=expandable, profile=profile)
    except ValueError as error:
        return first_line(error)
    except Exception as error:
        return f"its simulation failed: {type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
