"""What was measured as figures: one record for the product and for each peer, so that they are told alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

GIB = 1024**3
Record = dict[str, Any]


class Amount(NamedTuple):
    """What a step does, over all ranks."""

    units: float
    """tokens, or samples"""
    unit: str
    ranks: int
    flops: float | None
    peak_flops: float | None
    """of all devices together, operations a second"""


def figures(seconds: Sequence[float], amount: Amount) -> Record:
    """Step time and speed: the median and how far steps differ.

    Example:
        >>> figures([0.2, 0.1, 0.3], Amount(1000, "tokens", 2, 4e9, 1e11))["mfu"]
        0.2
    """
    step_s = statistics.median(seconds)
    quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [step_s] * 3
    mfu = amount.flops / step_s / amount.peak_flops if amount.flops and amount.peak_flops else None
    return {
        "step_s": round(step_s, 6),
        "step_s_quartiles": [round(quarters[0], 6), round(quarters[2], 6)],
        "step_s_range": [round(min(seconds), 6), round(max(seconds), 6)],
        "unit": amount.unit,
        "per_s_per_device": round(amount.units / step_s / amount.ranks, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "seconds": [round(value, 6) for value in seconds],
    }


def gib(size_bytes: float | None) -> float | None:
    """Bytes as GiB, to three digits."""
    return None if size_bytes is None else round(size_bytes / GIB, 3)
