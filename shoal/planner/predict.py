"""What one plan of a job needs: memory of every kind of rank, whether it fits, and the time of a step."""

from __future__ import annotations

import time
from typing import NamedTuple

from shoal.check import check
from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.plan import MOST_RECORDED, Plan
from shoal.planner.cost import costs_of
from shoal.planner.extend import shallowest, simulate_extended
from shoal.planner.host import Host, host_of
from shoal.planner.memory import Fit, Memory, Verdict, judge, memory_of
from shoal.planner.pipelines import simulate_stages
from shoal.planner.profile import Profile
from shoal.planner.simulate import boundary_of
from shoal.planner.timing import Timing, time_of
from shoal.planner.work import rates_without_data, work_of


class RankMemory(NamedTuple):
    """One rank, which stands for all that are like it."""

    rank: int
    stands_for: int
    """ranks with the same stages; others of them hold as much, or less where parameters do not divide evenly"""
    memory: Memory
    verdict: Verdict


class Prediction(NamedTuple):
    """What a plan needs."""

    plan: Plan
    cluster: Cluster
    ranks: list[RankMemory]
    """one for each rank of the pipeline"""
    host: Host
    timing: Timing
    seconds: float
    """that the simulation took"""

    @property
    def worst(self) -> RankMemory:
        """The rank with the most memory."""
        return max(self.ranks, key=lambda each: each.memory.device_bytes)

    @property
    def fit(self) -> Fit:
        """Whether the worst rank fits its device, and all ranks of a node its host."""
        fits = (self.worst.verdict.fit, self.host.fit)
        return next(fit for fit in (Fit.NOT, Fit.TIGHT, Fit.FITS) if fit in fits)

    @property
    def lack(self) -> str:
        """What there is too little of, in words; empty if it fits."""
        found = []
        if self.worst.verdict.fit is Fit.NOT:
            found.append(f"does not fit by {-(self.worst.verdict.margin_bytes or 0) / GIB:.1f} GiB")
        if self.host.fit is Fit.NOT:
            found.append(f"needs {self.host.describe()}")
        return " and ".join(found)


def largest_first(plan: Plan) -> Plan:
    """The plan with its largest share on rank 0, which is the one that is simulated: all ranks wait for those that have it.

    Raises:
        ValueError: with shares, ranks send their experts' ranks unlike numbers of rows, which is not simulated.
    """
    if plan.shares and plan.expert > 1 and len(set(plan.shares)) > 1:
        raise ValueError(
            f"plan.expert = {plan.expert} with plan.shares = {list(plan.shares)}: rows that ranks get from others with other "
            "shares are not simulated; ask about the plan without one of them"
        )
    return plan.model_copy(update={"shares": tuple(sorted(plan.shares, reverse=True))})


def predict(
    settings: Settings,
    plan: Plan,
    cluster: Cluster,
    *,
    expandable: bool = False,
    profile: Profile | None = None,
) -> Prediction:
    """Simulate a step of a job under a plan, for each rank of the pipeline.

    Args:
        expandable: with the allocator's expandable segments.
        profile: of the devices, from `shoal bench device`; left out: one that comes with shoal.

    Raises:
        ValueError: the plan does not fit the job or the cluster; the message says what would.
    """
    began = time.perf_counter()
    check(settings.job, plan, cluster)
    said, plan = plan, largest_first(plan)
    work = work_of(settings)
    each = plan.world_size // plan.pipeline  # the pipeline is the slowest axis
    # what goes between stages is alike on all ranks of the pipeline
    boundary = boundary_of(shallowest(work), plan, cluster, 0) if plan.pipeline > 1 else None
    count = plan.micro_batches(settings.job.train.global_batch)[0]
    if boundary is not None:
        traces = simulate_stages(work, plan, cluster, boundary, micro_batches=count)
    else:
        traces = {0: simulate_extended(work, plan, cluster)}
    ranks = []
    for rank, trace in traces.items():
        memory = memory_of(trace, plan, cluster.device.type, expandable=expandable)
        ranks.append(RankMemory(rank, each, memory, judge(memory, plan, cluster, expandable=expandable)))
    recorded = len(work.batch(plan, 0, 0).micro_batches)
    rates = rates_without_data(settings, work, cluster)
    memories = {each.rank: each.memory for each in ranks}
    host = host_of(traces, memories, plan, cluster, copies=bool(settings.checkpoint.memory_every))
    as_graph = bool(plan.cuda_graphs) and count <= MOST_RECORDED
    timing = time_of(traces, costs_of(cluster, profile), rates, (count, recorded), as_graph=as_graph)
    return Prediction(said, cluster, ranks, host, timing, time.perf_counter() - began)
