"""What the host needs for the launches of whole steps: more than for operators alone, as modules, hooks and `Step` are Python.

Ranks take steps of a model so narrow that a GPU is done with everything at once; what the planner says of the same steps is then
made to agree, by the host's time for an operator and for a call of compiled code.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from shoal.bench.rank import Course, feed
from shoal.cluster import Cluster
from shoal.config import Settings, parse
from shoal.planner.predict import predict
from shoal.planner.profile import Host, Profile
from shoal.run import Run
from shoal.train.pauses import Pauses
from shoal.train.setup import set_up
from shoal.world import World

LAYERS = 12
WARMUP, STEPS = 10, 40
KINDS = EAGER, COMPILED = "eager", "compiled"
MOST = 6.0  # times as long as an operator alone: more is no matter of operators


def settings_of(ranks: int, how: str) -> Settings:
    """A job of copies on so many ranks."""
    model = {"dim": 256, "layers": LAYERS, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 512, "tied": False}
    return parse(
        {
            "model": model,
            "data": {"source": "synthetic", "vocab": 512, "seq_len": 64, "eval_fraction": 0.0},
            "train": {"steps": 1 << 30, "global_batch": ranks, "precision": "bf16"},
            "plan": {"replicate": ranks, "compile": how == COMPILED, "cuda_graphs": False, "micro_batch": 1},
        },
        where="steps of a small model",
    )


def step_s(world: World, run: Run, status: Any, how: str) -> float:
    """Seconds of a step. Collective."""
    training = set_up(settings_of(world.size, how), world, run, status)
    with closing(feed(training)) as batches, Pauses() as pauses:
        course = Course(training, batches, pauses)
        course.take(WARMUP)
        course.take(STEPS)
    return statistics.median(course.seconds[WARMUP:])


def in_steps(profile: Profile, cluster: Cluster, measured: dict[str, float]) -> Profile:
    """The profile, whose host needs for steps what it was measured to.

    Args:
        measured: seconds of a step by how it was launched, as `step_s` has them.
    """

    def predicted(settings: Settings, profile: Profile) -> float:
        assert settings.plan is not None
        return predict(settings, settings.plan, cluster, profile=profile).timing.seconds

    for how, part in ((EAGER, "operator_s"), (COMPILED, "graph_s")):
        if how in measured:
            settings = settings_of(profile.devices, how)
            profile = agreeing(profile, part, measured[how], lambda p, s=settings: predicted(s, p))
    return profile


def agreeing(
    profile: Profile, part: str, measured_s: float, predicted: Callable[[Profile], float]
) -> Profile:
    """The profile with such seconds of a part of the host's that a step is predicted as it was measured, if it took longer."""
    alone = getattr(profile.host, part)
    first, second = predicted(profile), predicted(_with(profile, part, 2 * alone))
    if measured_s <= first or second <= first:
        return profile
    times = 1 + (measured_s - first) / (second - first)
    return _with(profile, part, alone * min(times, MOST))


def _with(profile: Profile, part: str, seconds: float) -> Profile:
    host = Host(**profile.host.model_dump() | {part: seconds})
    return profile.model_copy(update={"host": host})


def main() -> int:
    """What standard input has (a profile, the cluster, seconds of steps) as a profile, on standard output."""
    ask = json.load(sys.stdin)
    profile = Profile.model_validate(ask["profile"])
    print(in_steps(profile, Cluster.parse(ask["on"]), ask["measured"]).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
