"""`StepResult`: what a step tells, read when it is there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shoal.data.cut import StepBatch
from shoal.parallel.host import Sent


class Numbers(NamedTuple):
    """A step's numbers, equal on all ranks."""

    loss: float
    """mean over the global batch, before the update"""
    grad_norm: float
    """global L2 norm of that mean's gradient, before clipping"""
    weight: float
    """what the loss is a mean of: tokens with a label, or samples"""
    skipped: bool
    """the update was left out: the norm was not finite, or nothing had weight"""
    stop: bool
    """some rank asks all to stop after this step"""


class StepResult:
    """Numbers that may still be on their way from the device; reading one waits for the step, and for nothing after it."""

    def __init__(self, batch: StepBatch, lr: float, sent: Sent, losses: Tensor) -> None:
        self.step = batch.step
        self.lr = lr
        self.batch, self.losses = batch, losses
        self.sent = sent
        """the numbers, on their way: they arrive at the end of the step"""
        self._numbers: Numbers | None = None

    @property
    def numbers(self) -> Numbers:
        if self._numbers is None:
            loss, norm, weight, skipped, stop = self.sent.read()
            self._numbers = Numbers(loss, norm, weight, skipped > 0, stop > 0)
        return self._numbers

    @property
    def loss(self) -> float:
        return self.numbers.loss

    @property
    def grad_norm(self) -> float:
        return self.numbers.grad_norm

    @property
    def tokens(self) -> int:
        """Labels that counted (samples, for a plain loss)."""
        return round(self.numbers.weight)

    @property
    def skipped(self) -> bool:
        return self.numbers.skipped
