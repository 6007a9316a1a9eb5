"""A made prediction, for what does not need a simulation."""

from __future__ import annotations

from typing import Any

from shoal.cluster import GIB, Cluster
from shoal.config import Settings, parse
from shoal.plan import Plan
from shoal.planner.host import Host
from shoal.planner.launch import Moment
from shoal.planner.memory import Category, Memory, Peak, Tensor, judge
from shoal.planner.predict import Prediction, RankMemory
from shoal.planner.replay import Part, RankTime, Span
from shoal.planner.timing import Timing


def made_prediction(
    settings: Settings,
    plan: Plan,
    cluster: Cluster,
    *,
    gib: float = 120.0,
    name: str = "blocks.0.w",
    **_: Any,
) -> Prediction:
    """Parameters of `gib`, cut as the plan cuts, and 1 GiB more on the first rank of a pipeline."""
    ranks = []
    each = plan.world_size // plan.pipeline
    for rank in range(0, plan.world_size, each):
        parameters = int(gib * GIB) // (plan.cut * plan.tensor * plan.pipeline)
        by = {Category.PARAMETERS: parameters, Category.ACTIVATIONS: GIB + GIB * (rank == 0)}
        tensor = Tensor(Category.PARAMETERS, parameters, (2, 3), "bfloat16", "aten.mm.default", name)
        peak = Peak(sum(by.values()), Moment(1, "backward", "blocks.0"), by, [tensor], tensor)
        memory = Memory(peak, peak.allocated_bytes + GIB, 2 * GIB, 0, {"backward": peak.allocated_bytes})
        ranks.append(RankMemory(rank, each, memory, judge(memory, plan, cluster)))
    return Prediction(plan, cluster, ranks, Host(0, 0, None), made_timing(plan), 0.0)


def made_timing(plan: Plan, seconds: float = 0.5) -> Timing:
    """A step of half a second, a tenth of it exposed communication."""
    parts = dict.fromkeys(Part, 0.0) | {Part.MATMUL: 0.9 * seconds, Part.EXPOSED: 0.1 * seconds}
    span = Span(0, "compute", "blocks.0", "forward", 0, 0.0, 0.9 * seconds)
    ranks = [RankTime(rank, parts, 0.2 * seconds, [span]) for rank in range(plan.pipeline)]
    return Timing(
        seconds, 0.9 * seconds, 1.1 * seconds, "made up", "tokens", 1000.0 / seconds, 0.4, ranks, (1, 1)
    )


def made_settings(**tables: Any) -> Settings:
    job = {"model": {"preset": "1m"}, "data": {"source": "synthetic", "vocab": 320, "seq_len": 64}}
    return parse({**job, "train": {"global_batch": 16}, **tables}, where="test")
