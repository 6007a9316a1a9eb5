"""`bench_device`: let the ranks of this machine measure their devices, and make one `Profile` of what all of them found."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.bench import device_steps
from shoal.bench.ask import DEVICE_TARGET, read_answers, write_seconds
from shoal.bench.step import BenchError
from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.launch.local import launch
from shoal.planner.profile import Curve, Profile
from shoal.run import Run

GPU_SECONDS, CPU_SECONDS = 50.0, 8.0
SIMULATED_S = 120.0  # that simulating the steps of a small model may take
VERSIONS = ("torch", "cuda", "cudnn", "nccl", "driver")
Most = Callable[[Sequence[float]], float]


def ranks_of(cluster: Cluster, said: int | None) -> int:
    """As many ranks as there are devices, or as are asked for.

    Raises:
        ValueError: there are not so many GPUs.
    """
    if said is not None and cluster.device.type == "cuda" and said > cluster.num_devices:
        raise ValueError(
            f"--ranks {said}, but this machine is {cluster.describe()}: a rank has a GPU of its own; give at most "
            f"{cluster.num_devices}, or leave --ranks out"
        )
    return said or cluster.num_devices


def require_file(out: Path) -> None:
    """Make the folder of a file that is written later.

    Raises:
        ValueError: it can't be made, or the file is a folder.
    """
    if out.is_dir():
        raise ValueError(f"--out: {out} is a folder; give the file to write, such as {out / 'profile.json'}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: {out.parent} cannot be made: {error.strerror}; give a file in a folder that can be written"
        ) from error


def bench_device(
    cluster: Cluster, ranks: int, seconds: float | None = None, *, quiet: bool = False
) -> Profile:
    """Measure the devices of this machine, one a rank.

    Args:
        cluster: this machine.
        seconds: how long ranks measure, beside their start; None: GPU_SECONDS or CPU_SECONDS.
        quiet: a failure is not told on stderr, but by the error alone.

    Raises:
        BenchError: a rank failed.
    """
    if seconds is None:
        seconds = CPU_SECONDS if cluster.device.type == "cpu" else GPU_SECONDS
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as place:
        run, settings = Run(Path(place)), Settings()
        write_seconds(run, seconds)
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"dir": place})})
        device = "cpu" if cluster.device.type == "cpu" else "auto"
        outcome = launch(settings, ranks, device=device, target=DEVICE_TARGET, quiet=quiet)
        if outcome.state != "ok":
            raise BenchError(outcome.report or "stopped before the end")
        answers = read_answers(run, ranks)
    profile = profile_of(cluster.device.kind, answers)
    if "steps" not in answers[0]:
        return profile
    return _in_steps(profile, cluster, over_ranks([answer["steps"] for answer in answers], max))


def _in_steps(profile: Profile, cluster: Cluster, measured: dict[str, float]) -> Profile:
    """As `in_steps`, in a process that sees no GPU, as simulations need it; the profile as it is, if that fails."""
    on = f"{profile.devices} {cluster.device.kind}"
    ask = {"profile": profile.model_dump(mode="json"), "on": on, "measured": measured}
    try:
        done = subprocess.run(
            [sys.executable, "-m", device_steps.__name__],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            input=json.dumps(ask),
            capture_output=True,
            text=True,
            timeout=SIMULATED_S,
        )
        if done.returncode == 0:
            return Profile.model_validate_json(done.stdout.strip().rpartition("\n")[2])
        why = done.stderr.strip().rpartition("\n")[2].removeprefix("[rank0]: ")
    except (subprocess.TimeoutExpired, ValueError) as error:
        why = str(error)
    print(f"the host's time for whole steps is not in the profile: {why}", file=sys.stderr)
    return profile


def profile_of(kind: str, answers: Sequence[dict[str, Any]]) -> Profile:
    """One profile of what all ranks measured: a collective takes as long as its slowest rank, the rest is the median."""
    first = answers[0]
    found = over_ranks([_measured(answer) for answer in answers], statistics.median)
    curves = over_ranks([answer["collectives"] for answer in answers], max)
    found["collectives"] = {name: rising(curve) for name, curve in curves.items()}
    found |= {key: rising(found[key]) for key in ("moves", "host_copies")}
    versions = first["about"]["versions"]
    said = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name))
    return Profile.model_validate(
        found
        | {
            "device": kind,
            "name": first["about"]["device"],
            "about": f"measured by `shoal bench device` in {first['took_s']:.0f} s on {len(answers)} ranks: {said}",
            "devices": len(answers),
        }
    )


def _measured(answer: dict[str, Any]) -> dict[str, Any]:
    apart = ("about", "took_s", "collectives", "steps")
    return {key: value for key, value in answer.items() if key not in apart}


def over_ranks(answers: Sequence[Any], combine: Most) -> Any:
    """Answers of one form as one: every number that is not whole (a time) is combined, all else is the first's.

    Example:
        >>> over_ranks([[64, 1.0], [64, 3.0]], max)
        [64, 3.0]
    """
    first = answers[0]
    if isinstance(first, float):
        return combine(answers)
    if isinstance(first, dict):
        return {key: over_ranks([answer[key] for answer in answers], combine) for key in first}
    if isinstance(first, list):
        return [over_ranks(values, combine) for values in zip(*answers, strict=True)]
    return first


def rising(curve: Sequence[Sequence[float]]) -> Curve:
    """A curve on which less never takes longer than more: a disturbance makes a time too long, never too short.

    Example:
        >>> rising([[1, 0.5], [2, 0.9], [4, 0.7]])
        ((1, 0.5), (2, 0.7), (4, 0.7))
    """
    points: list[tuple[float, float]] = []
    for size, seconds in reversed(curve):
        points.append((size, min(seconds, points[-1][1]) if points else seconds))
    return tuple(reversed(points))
