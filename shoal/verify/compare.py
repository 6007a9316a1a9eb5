"""Are two runs the same up to rounding? The yardstick is how far one device itself is from the exact numbers.

The job is run three times from the same weights and data: on one device in fp64 (taken as exact), on one device in the job's
precision, and under the plan. A number of the plan may be `SLACK` times as far from the exact one as one device's is and as
reordering its sums explains: a sum of n terms in another order is off by about sqrt(n) roundings (Higham and Mary 2019, SIAM J.
Sci. Comput. 41), and each of p partial results that is rounded before it is added makes sqrt(p) more in the compute type.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.config import Settings
from shoal.job import Precision
from shoal.parallel.precision import types_of
from shoal.plan import Plan
from shoal.verify.record import Record

SLACK = 12.0
"""Errors of two roundings of one computation differ by chance: in benchmarks/results/parity.json their ratio is at most 6.4, and
over 33 seeds of a few plans (benchmarks/parity.py --repeat) it was 7.7."""


AMPLIFIED = 100.0
"""In fp64 one device is the exact run itself, and cannot show how much a step of AdamW amplifies rounding."""


class Difference(NamedTuple):
    """How far a number is off, and how far rounding explains."""

    what: str
    step: int | None
    error: float
    tolerance: float

    def describe(self) -> str:
        """`step 1: gradient of 'norm.weight' is off by 5.0e-01 (relative), tolerance 3.1e-06`."""
        when = f"step {self.step}: " if self.step is not None else ""
        return f"{when}{self.what} is off by {self.error:.1e} (relative), tolerance {self.tolerance:.1e}"


class Allowed(NamedTuple):
    """What those numbers were allowed that were furthest off."""

    loss: float
    norm: float
    gradient: float
    weights: float


class Comparison(NamedTuple):
    """What came of a comparison: relative errors against the exact run, and the first difference, if any."""

    loss: float
    norm: float
    gradient: float
    worst: str
    """the parameter whose gradient was furthest off"""
    weights: float
    first: Difference | None
    closest: float = 0.0
    """the largest error as a part of what is allowed: above 1 with a difference"""
    allowed: Allowed = Allowed(0.0, 0.0, 0.0, 0.0)
    """beside the four errors"""

    @property
    def same(self) -> bool:
        return self.first is None


def rounding(settings: Settings, plan: Plan) -> float:
    """How far reordering the plan's sums may put a number, relative to it."""
    unit, wide = (_unit(kind) for kind in _kinds(settings.train.precision))
    job = settings.job
    terms = job.train.global_batch * max(1, job.data.seq_len)
    layers = settings.model.layers or 1
    parts = plan.tensor * plan.context * 4 * layers
    found = unit * math.sqrt(parts) + wide * math.sqrt(terms)
    return found * AMPLIFIED if settings.train.precision == "fp64" else found


def same_batches(plan: Plan) -> bool:
    """Whether each layer sees the batches that one device's layers see, so that running statistics are equal."""
    return plan.data_degree * plan.context * plan.tensor == 1


def compare(
    exact: Record, one: Record, plan: Record, allowed: float, *, buffers: bool = False, jumps: bool = False
) -> Comparison:
    """Compare a plan's record with one device's, measured by the exact one.

    Args:
        allowed: relative error that reordered sums explain, from `rounding`.
        buffers: compare these, too; see `same_batches`.
        jumps: rounding may send a token to another expert, which changes some parameters' gradients much, and others' little:
            which and when is chance. So errors of gradients are relative to the whole gradient, and a parameter may be off as
            far as any of one device's is in any step.
    """
    if plan.initial != one.initial:
        first = Difference("hash of the initial weights", None, math.inf, 0.0)
        return Comparison(math.inf, math.inf, math.inf, "", math.inf, first)
    judged: list[Difference] = []
    worst = (0.0, "")
    scales = [norm * (1.0 if jumps else 1e-3) for norm in exact.norms]
    owns_by_step = _gradient_errors(one, exact, scales)
    most = max((error for owns in owns_by_step for error in owns.values()), default=0.0)
    for step, errors in enumerate(_gradient_errors(plan, exact, scales)):
        for name, error in errors.items():
            worst = max(worst, (error, name))
            own = most if jumps else owns_by_step[step][name]
            judged.append(_judge(f"gradient of {name!r}", step + 1, error, own, allowed))
        for what, truth, ours, theirs in (
            ("gradient norm", exact.norms[step], one.norms[step], plan.norms[step]),
            ("loss", exact.losses[step], one.losses[step], plan.losses[step]),
        ):
            judged.append(_judge(what, step + 1, _off(theirs, truth), _off(ours, truth), allowed))
    weights = 0.0
    owns = {name: _error(one.weights.get(name), truth, 0.0) for name, truth in exact.weights.items()}
    most = max(owns.values(), default=0.0)
    for name, truth in exact.weights.items():
        error, own = _error(plan.weights.get(name), truth, 0.0), most if jumps else owns[name]
        weights = max(weights, error)
        judged.append(_judge(f"weight {name!r}", len(exact.losses), error, own, allowed))
    for name, truth in exact.buffers.items() if buffers else ():
        error, own = (_error(run.buffers.get(name), truth, 0.0) for run in (plan, one))
        judged.append(_judge(f"buffer {name!r}", len(exact.losses), error, own, allowed))
    return Comparison(
        max(map(_off, plan.losses, exact.losses)),
        max(map(_off, plan.norms, exact.norms)),
        *worst,
        weights,
        next((one for one in judged if one.error > one.tolerance), None),
        max(one.error / one.tolerance for one in judged),
        Allowed(*(_of_furthest(judged, kind) for kind in ("loss", "gradient norm", "gradient of", "weight"))),
    )


def _gradient_errors(found: Record, exact: Record, scales: list[float]) -> list[dict[str, float]]:
    """Of each step, each parameter's: see `_error`."""
    return [
        {name: _error(found.gradients[step].get(name), truth, scales[step]) for name, truth in truths.items()}
        for step, truths in enumerate(exact.gradients)
    ]


def _judge(what: str, step: int, error: float, own: float, allowed: float) -> Difference:
    return Difference(what, step, error, SLACK * (own + allowed))


def _of_furthest(judged: list[Difference], kind: str) -> float:
    """The tolerance of the number of a kind with the largest error."""
    return max((one for one in judged if one.what.startswith(kind)), key=lambda one: one.error).tolerance


def _error(found: Tensor | None, truth: Tensor, scale: float) -> float:
    """Relative to the tensor's length; to `scale` where the tensor is shorter, as a gradient that cancels out is."""
    if found is None or found.shape != truth.shape:
        return math.inf
    off = torch.linalg.vector_norm(found.double() - truth).item()
    error = off / max(torch.linalg.vector_norm(truth).item(), scale, 1e-300)
    return error if math.isfinite(error) else math.inf


def _off(found: float, truth: float) -> float:
    error = abs(found - truth) / max(abs(truth), 1e-300)
    return error if math.isfinite(error) else math.inf


def _kinds(precision: Precision) -> tuple[torch.dtype, torch.dtype]:
    types = types_of(precision)
    return types.compute, types.master


def _unit(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps / 2
