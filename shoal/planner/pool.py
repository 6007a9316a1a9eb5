"""Predictions of several plans, in processes of their own: a simulation changes what torch is for the whole process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.predict import Prediction, predict
from shoal.planner.profile import Profile

FEW = 4  # simulations that take less time than a second process takes to import torch
MOST_PROCESSES = 8  # a simulation of 8B parameters takes about 1 GiB of host memory and one core


def predict_all(
    wanted: Sequence[tuple[Plan, Cluster]],
    settings: Settings,
    *,
    expandable: bool = False,
    profile: Profile | None = None,
) -> Iterator[tuple[int, Prediction | str]]:
    """Predictions by their index, or the reasons why there are none, as they are made."""
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    if len(wanted) <= FEW or processes == 1:
        for index, (plan, cluster) in enumerate(wanted):
            yield index, predict_or_say(settings, plan, cluster, expandable, profile)
        return
    # spawned: a process with torch's threads cannot be forked
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {
            pool.submit(predict_or_say, settings, plan, cluster, expandable, profile): index
            for index, (plan, cluster) in enumerate(wanted)
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


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
