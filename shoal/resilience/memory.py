"""A rank that is out of memory: how that is told from other errors, and under which plan the run goes on.

[Note: a step is taken again by all] When one rank has no memory left in the middle of a step, the others wait for it inside of
collectives that cannot be taken back. So all ranks end and are started again, which takes about a second, from state in memory
or on disk, and take the step once more in smaller micro-batches: of the same samples, since the plan cuts a global batch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.causes import causes
from shoal.plan import Plan

# What torch, CUDA's libraries and NCCL say where they raise no OutOfMemoryError.
SAID = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"Cuda failure .{0,20}out of memory"
)
CUT_BY_MICRO_BATCH = ("forward", "diagnose", "eval")
"""phases that need less memory with a smaller micro-batch; "forward" has the backward in it"""
KEEPS_ALL = ("gpipe", "looped_bfs")
"""schedules that run all micro-batches forward before the first one backward"""


class Lighter(NamedTuple):
    """What is done about a rank that was out of memory: a plan that needs less, or why there is none."""

    plan: Plan | None
    why_not: str = ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what caused it, says that there was no memory left.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(RuntimeError("no"))
        (True, False)
    """
    return any(
        isinstance(link, MemoryError)
        or type(link).__name__ == "OutOfMemoryError"
        or (isinstance(link, RuntimeError) and SAID.search(str(link)) is not None)
        for link in causes(error)
    )


def lighter(plan: Plan, global_batch: int, phase: str) -> Lighter:
    """The plan with at most half the micro-batch, if that can help a rank that was out of memory in a phase.

    Example:
        >>> lighter(Plan(shard=2), global_batch=16, phase="forward").plan.micro_batch
        4
    """
    count, size = plan.micro_batches(global_batch)
    if phase not in CUT_BY_MICRO_BATCH:
        return Lighter(
            None, f"what is held in phase {phase} does not depend on the micro-batch; {_instead(plan)}"
        )
    if plan.pipeline > 1 and plan.schedule in KEEPS_ALL:
        why = f"plan.schedule = {plan.schedule!r} keeps all micro-batches, however small they are"
        return Lighter(None, f"{why}; use plan.schedule=1f1b, or {_instead(plan)}")
    local = count * size
    smaller = next((half for half in range(size // 2, 0, -1) if local % half == 0), None)
    if smaller is None and plan.shares:
        return _with_equal_shares(plan, global_batch, size)
    if smaller is None:
        return Lighter(None, f"the micro-batch is one sample, and cannot be smaller; {_instead(plan)}")
    return Lighter(plan.model_copy(update={"micro_batch": smaller}))


def _with_equal_shares(plan: Plan, global_batch: int, size: int) -> Lighter:
    """The plan without shares, with at most half the largest micro-batch that they made."""
    local, left = divmod(global_batch, plan.data_degree)
    most = size * max(plan.shares) // 2
    equal = max((half for half in range(1, most + 1) if not left and local % half == 0), default=None)
    if equal is None:
        why = f"plan.shares = {list(plan.shares)} cannot be halved, nor {global_batch} samples be dealt out evenly"
        return Lighter(None, f"{why}; use smaller shares, or {_instead(plan)}")
    return Lighter(plan.model_copy(update={"micro_batch": equal, "shares": ()}))


def _instead(plan: Plan) -> str:
    """Other plans that need less memory, those that cost least time first."""
    ways = ["plan.recompute=full"] if plan.recompute == "none" else []
    if plan.replicate > 1:
        ways.append(f"plan.shard={plan.shard * plan.replicate} in place of plan.replicate")
    missing = [word for word in ("optimizer", "activations", "parameters") if word not in plan.offload]
    if missing and plan.compile != "model":
        ways.append(f"plan.offload={','.join([*plan.offload, missing[0]])}")
    said = f"try {', or '.join(ways)}" if ways else "use more devices with plan.shard"
    return f"{said}; `shoal plan` predicts the memory of each plan"
