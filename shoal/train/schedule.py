"""Learning rates as a pure function of the optimizer step, so that resuming needs no state."""

from __future__ import annotations

import math

from shoal.job import Optimizer


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """The rate for step `step` of `range(total_steps)`.

    Warm-up rises linearly and reaches `lr` with its last step. `linear` and `cosine` then fall to `min_lr * lr` at the last
    step; `wsd` stays and falls linearly over the last `decay` steps (Hu et al. 2024, arXiv:2404.06395).

    Example:
        >>> learning_rate(Optimizer(lr=1.0, schedule="constant", warmup=4), 1, 10)
        0.5
    """
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    return optimizer.lr * _after_warmup(optimizer, step, total_steps)


def _after_warmup(optimizer: Optimizer, step: int, total_steps: int) -> float:
    floor = optimizer.min_lr
    if optimizer.schedule == "constant":
        return 1.0
    if optimizer.schedule == "wsd":
        done = _fraction(step, total_steps - optimizer.decay - 1, total_steps - 1)
        return 1.0 - (1.0 - floor) * done
    done = _fraction(step, optimizer.warmup - 1 if optimizer.warmup else 0, total_steps - 1)
    if optimizer.schedule == "linear":
        return 1.0 - (1.0 - floor) * done
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def _fraction(step: int, first: int, last: int) -> float:
    """How far `step` is from `first` (0) to `last` (1)."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))
