"""The plan of a job for as many ranks as there are: the degrees that share data get smaller, and the global batch stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.config import ConfigError, Settings
from shoal.plan import Plan, effective


def fitted(
    settings: Settings, ranks: int, ready: Callable[[Settings, int], Settings]
) -> tuple[Settings | None, str]:
    """Settings for at most `ranks` ranks, as many of them as can take part; None and why, if none can.

    Args:
        ready: makes settings ready for so many ranks, or raises ConfigError.
    """
    why = f"{ranks} ranks are fewer than the plan's axes need"
    for number, (size, plan) in enumerate(smaller(settings.plan, ranks)):
        try:
            return ready(settings if plan is None else settings.with_plan(plan), size), ""
        except ConfigError as error:
            why = str(error) if number == 0 else why
    return None, why


def smaller(plan: Plan | None, ranks: int) -> Iterator[tuple[int, Plan | None]]:
    """World sizes and plans, largest first; no plan where degrees are chosen for the world.

    Example:
        >>> [(size, plan.describe()) for size, plan in smaller(Plan(replicate=2, shard=2, tensor=2), 6)]
        [(4, 'tensor 2 x shard 2 (ZeRO-3)'), (2, 'tensor 2')]
    """
    if plan is None or not plan.says_degrees:
        yield from ((size, None) for size in range(ranks, 0, -1))
        return
    others = plan.world_size // (plan.replicate * plan.shard)
    for degree in range(min(ranks // others, plan.replicate * plan.shard), 0, -1):
        if degree % plan.shard == 0:
            changed = {"replicate": degree // plan.shard, "shard": plan.shard}
        elif plan.replicate == 1 or degree < plan.shard:
            changed = {"replicate": 1, "shard": degree}
        else:
            continue
        keys = plan.model_dump(include=plan.model_fields_set) | changed
        try:
            yield degree * others, Plan.model_validate(effective(keys))
        except ValueError:
            continue
