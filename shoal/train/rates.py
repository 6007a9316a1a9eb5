"""What a step is worth: its usual weight, its operations and its unit, from which speed and MFU are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from shoal.data.user import collate_of, first_sample, is_iterable
from shoal.job import Job
from shoal.models.moe_presets import resolve_moe
from shoal.models.presets import resolve
from shoal.train.flops import counted_flops, llama_flops_per_token, moe_flops_per_token
from shoal.train.objective import Objective


class Rates(NamedTuple):
    """Of one step over the global batch."""

    unit: str
    """what the loss is a mean of: "tokens" or "samples" """
    usual_weight: float
    flops_per_step: float | None
    peak_flops: float | None
    """of all devices together, operations a second; None where it is not known"""

    def mfu(self, seconds: float) -> float | None:
        """The part of the peak that a step of `seconds` reached; None where it cannot be told."""
        if self.flops_per_step is None or self.peak_flops is None or seconds <= 0:
            return None
        return self.flops_per_step / seconds / self.peak_flops


def rates(
    job: Job,
    build: Callable[[], nn.Module],
    objective: Objective,
    datasets: Any,
    device_flops: float | None,
    num_devices: int,
) -> Rates:
    """Rates of a job on devices of `device_flops` each."""
    is_text = datasets.vocab is not None

    def sample() -> Any:
        if not is_text and is_iterable(datasets.train):
            return None
        train = datasets.train
        return (
            train.fetch(np.array([0]))
            if is_text
            else collate_of(train)([first_sample(train, job.data.on_error)])
        )

    return rates_of(job, build, objective, datasets.vocab, sample, device_flops, num_devices)


def rates_of(
    job: Job,
    build: Callable[[], nn.Module],
    objective: Objective,
    vocab: int | None,
    sample: Callable[[], Any],
    device_flops: float | None,
    num_devices: int,
) -> Rates:
    """As `rates`, without data.

    Args:
        vocab: of a job on text; else None.
        sample: gives a batch of one, or None where there is none.
    """
    batch, is_text = job.train.global_batch, vocab is not None
    weight = float(batch * job.data.seq_len if is_text else batch)
    peak = device_flops * num_devices if device_flops else None
    flops = None
    if peak and is_text and job.model.family == "llama":
        flops = llama_flops_per_token(resolve(job.model, vocab), job.data.seq_len) * weight
    elif peak and is_text and job.model.family == "moe":
        flops = moe_flops_per_token(resolve_moe(job.model, vocab), job.data.seq_len) * weight
    elif peak and (one := sample()) is not None:
        counted = counted_flops(build, objective, one)
        flops = counted * batch if counted else None
    return Rates("tokens" if is_text else "samples", weight, flops, peak)
