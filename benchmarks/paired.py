"""Statistics of paired measurements: how much slower the first of two is, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Comparison(NamedTuple):
    """One way against another, from blocks of steps taken in turn."""

    first_s: float
    """median seconds of a step"""
    second_s: float
    overhead: float
    """median over pairs of blocks of (first - second) / second"""
    low: float
    """95% interval of `overhead`"""
    high: float
    pairs: int


def compare(first: list[list[float]], second: list[list[float]], *, resamples: int = 10_000) -> Comparison:
    """Compare seconds by block; block i of both was measured together, so that noise of the machine meets both.

    Example:
        >>> compare([[1.1, 1.1], [2.2, 2.2]], [[1.0, 1.0], [2.0, 2.0]]).overhead
        0.1
    """
    ours, theirs = (np.array([np.median(block) for block in blocks]) for blocks in (first, second))
    relative = (ours - theirs) / theirs
    low, high = bootstrap(relative, resamples)
    return Comparison(
        first_s=float(np.median(np.concatenate(first))),
        second_s=float(np.median(np.concatenate(second))),
        overhead=round(float(np.median(relative)), 6),
        low=round(low, 6),
        high=round(high, 6),
        pairs=len(relative),
    )


def bootstrap(values: np.ndarray, resamples: int, seed: int = 0) -> tuple[float, float]:
    """The 95% percentile interval of the median of `values` (Efron 1979)."""
    generator = np.random.default_rng(seed)
    drawn = generator.choice(values, size=(resamples, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)
