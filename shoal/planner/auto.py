"""The plan of a job on GPUs that asks for a search (`run.search`): the best that one finds.

It takes minutes, beside a run of hours. It runs in a process of its own that sees no GPU, as simulations
need it, and that can be given up. What it found is kept beside prepared data, by what the answer depends on: the same job on such
a cluster asks once.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shoal
from shoal.cluster import DEVICES, Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.memory import Fit
from shoal.run import write_whole

SIMULATIONS = 12
DEADLINE_S = 240.0  # after which the rules choose


class Answer(NamedTuple):
    """A plan that was searched for, or none."""

    plan: Plan | None
    why: str
    """what it was chosen for; or why there is none"""


def why_not_searched(settings: Settings, cluster: Cluster) -> str:
    """Why no plan can be searched for; empty if one can."""
    if settings.plan is not None and settings.plan.says_degrees:
        return f"the plan is said ({settings.plan.describe()})"
    if cluster.device.type != "cuda":
        return "a search cannot tell plans on CPUs apart, by times of CPUs that were not measured"
    if DEVICES.get(cluster.device.kind) != cluster.device:
        return f"nothing is known of the times of {cluster.device.kind!r}"
    return ""


def searched_plan(settings: Settings, cluster: Cluster, *, deadline_s: float = DEADLINE_S) -> Answer:
    """The fastest plan that fits, of those that a search simulates; from the cache, if the same was asked before."""
    path = Path(settings.run.cache).expanduser() / "plans" / f"{plan_key(settings, cluster)}.json"
    try:
        return _read(path.read_text())
    except (OSError, ValueError, KeyError, IndexError):  # not there, or not ours
        pass
    try:
        found = _ask(settings, cluster, deadline_s)
        answer = _read(found)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return Answer(None, str(error) or type(error).__name__)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, found)
    except OSError:
        return answer  # asked again next time
    return answer._replace(why=f"{answer.why}; {path}")


def plan_key(settings: Settings, cluster: Cluster) -> str:
    """Of all that the answer depends on: the job, what is said of the plan, the cluster, and the versions that simulate it."""
    said = settings.plan.model_dump(include=settings.plan.model_fields_set) if settings.plan else {}
    parts = [
        settings.job.model_dump(mode="json"),
        said,
        cluster.describe(),
        shoal.__version__,
        torch.__version__,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _ask(settings: Settings, cluster: Cluster, deadline_s: float) -> str:
    """What `shoal plan --search --json` prints.

    Raises:
        ValueError: it found no plan, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(settings.to_toml())
        words = ["--search", "--json", "--most", str(SIMULATIONS), "--on", cluster.describe()]
        command = [sys.executable, "-m", "shoal", "plan", str(job), *words]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the search took more than {deadline_s:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            lines[-1] if lines and done.returncode != 1 else "none of the plans that were simulated fits"
        )
    return done.stdout


def _read(text: str) -> Answer:
    found: dict[str, Any] = json.loads(text)
    plans = found["plans"]
    best = next(
        (plan for plan in plans if plan["fit"] == Fit.FITS), plans[0]
    )  # rather than one that hardly fits
    simulated = len(plans) + len(found["rejected"])
    return Answer(
        Plan.model_validate(best["plan"]),
        f"the fastest of {simulated} plans that were simulated, {1e3 * best['step']['seconds']:.0f} ms a step",
    )
