"""What is said of plans in messages."""

from __future__ import annotations

from shoal.plan import STAGES, Plan


def fewer_stages(plan: Plan, blocks: int) -> str:
    """What to say in place of a pipeline with more stages than a model has blocks.

    Example:
        >>> fewer_stages(Plan(pipeline=4, schedule="zbv"), 6)
        'use plan.pipeline=3 or fewer, or plan.schedule=1f1b'
    """
    most, each, ways = blocks // plan.stages_per_rank, blocks // plan.pipeline, []
    if most > 1:
        ways.append(f"plan.pipeline={most}" + (" or fewer" if most > 2 else ""))
    if plan.schedule not in STAGES and each > 1:
        ways.append(f"plan.virtual_stages={each}")
    elif plan.stages_per_rank > 1 and blocks > 1:
        fits = f" with plan.pipeline={blocks}" if each == 0 else ""
        left_out = "" if plan.virtual_stages is None else ", without plan.virtual_stages"
        ways.append(f"plan.schedule=1f1b{fits}{left_out}")
    return f"use {', or '.join(ways)}" if ways else "use plan.pipeline=1 and another axis"
