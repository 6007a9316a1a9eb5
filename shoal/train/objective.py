"""Objectives: how a model is called on a batch, and a loss that says what it is a mean of.

A loss is a *sum* and the *weight* it is to be divided by (tokens, samples). `Step` adds both over all micro-batches and
ranks and divides once, so that a global batch is one batch however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.tensor import cross_entropy_sum, whole_output
from shoal.tensors import tensors_in
from shoal.train import entropy


class Loss(NamedTuple):
    """A sum of losses, and the number (or weight) of the things it sums over. Both scalars."""

    sum: Tensor
    weight: Tensor | float


class Objective(Protocol):
    """What is minimised."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Call the model on a batch."""

    def loss(self, output: Any, batch: Any) -> Loss:
        """The loss of an output."""


def output_of(objective: Objective, model: nn.Module, batch: Any) -> Any:
    """The model's output on a batch: whole, unless the objective takes parts of a vocabulary."""
    output = objective.forward(model, batch)
    return output if getattr(objective, "takes_parts", False) else whole_output(output)


class NextToken:
    """Cross-entropy of the next token, over the labels that are not -100. Takes logits that are cut by vocabulary as they are.

    Args:
        compiled: read logits once, by kernels of Shoal's own, or where these do not take them by what torch compiles; for GPUs.
    """

    takes_parts = True

    def __init__(self, *, compiled: bool = False) -> None:
        self._compiled = compiled
        self._sum = torch.compile(_cross_entropy_sum) if compiled else _cross_entropy_sum
        self._parts_sum = torch.compile(cross_entropy_sum) if compiled else cross_entropy_sum

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Logits (B, T, V)."""
        known = {name: batch[name] for name in ("positions", "documents") if name in batch}
        return model(batch["tokens"], **known)

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Loss:
        labels = batch["labels"]
        weight = (labels != -100).sum()
        if isinstance(output, DTensor):
            parts, group = output.to_local().flatten(0, 1), output.device_mesh.get_group()
            return Loss(self._parts_sum(parts, labels.flatten(), group), weight)
        if self._compiled and entropy.takes(output):
            return Loss(entropy.cross_entropy_sum(output.flatten(0, 1), labels.flatten()), weight)
        return Loss(self._sum(output, labels), weight)


def _cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels.flatten(), ignore_index=-100, reduction="sum")


class Supervised:
    """A plain loss of (output, target) on batches of (inputs, target).

    The function returns a mean over the batch's samples, whose weight is then the number of samples; or itself a
    `(sum, weight)` pair.

    Example:
        Supervised(torch.nn.functional.cross_entropy)
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The model's output on the inputs.

        Raises:
            TypeError: the batch is not a pair.
        """
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise TypeError(
                f"a plain loss needs batches of (inputs, target), and the dataset gives {type(batch).__name__}; write an "
                "objective with forward(model, batch) and loss(output, batch) for other batches"
            )
        return model(batch[0])

    def loss(self, output: Any, batch: Any) -> Loss:
        result = self._function(output, batch[1])
        if isinstance(result, tuple):
            return Loss(*result)
        if result.dim() > 0:
            raise TypeError(
                f"the loss function gave a tensor of shape {tuple(result.shape)}; expected a scalar mean over the batch, or "
                "(sum, weight); use reduction='mean'"
            )
        samples = num_samples(batch[1])
        return Loss(result * samples, samples)


def num_samples(target: Any) -> int:
    """Rows of a target: of its first tensor, inside tuples, lists and dicts.

    Raises:
        TypeError: there is no tensor in it.
    """
    tensors = tensors_in(target)
    if not tensors or tensors[0].dim() == 0:
        raise TypeError(
            f"the target is {type(target).__name__} without a tensor of samples, so a mean cannot be weighted; return "
            "(sum, weight) from the loss function"
        )
    return len(tensors[0])


def as_objective(given: Any) -> Objective:
    """An objective from an object of a user's: an objective, its class, or a plain loss function.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(given, type):
        given = given()
    if hasattr(given, "forward") and hasattr(given, "loss"):
        return given
    if callable(given):
        return Supervised(given)
    raise TypeError(
        f"{given!r} is no objective: expected a loss function of (output, target), or an object with "
        "forward(model, batch) and loss(output, batch)"
    )
