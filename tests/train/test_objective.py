"""A loss is a sum and what it is to be divided by, so that a batch gives the same mean however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.train.objective import Loss, NextToken, Objective, Supervised, as_objective

VOCAB = 11


def ragged() -> tuple[Tensor, Tensor]:
    """Logits (B, T, V), and labels of which samples keep 0 to all."""
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (6, 5))
    for row, kept in enumerate([5, 0, 1, 4, 5, 2]):
        labels[row, kept:] = -100
    return torch.randn(6, 5, VOCAB, dtype=torch.float64), labels


def mean(parts: Sequence[Loss]) -> float:
    return float(sum(part.sum for part in parts) / sum(float(part.weight) for part in parts))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_ragged_labels_give_one_mean_however_the_batch_is_cut(size: int) -> None:
    logits, labels = ragged()
    by_hand = [
        -float(logits[row, at].log_softmax(-1)[label])
        for row, line in enumerate(labels.tolist())
        for at, label in enumerate(line)
        if label != -100
    ]
    parts = [
        NextToken().loss(output, {"labels": wanted})
        for output, wanted in zip(logits.split(size), labels.split(size), strict=True)
    ]
    assert mean(parts) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-12)
    assert sum(int(part.weight) for part in parts) == len(by_hand) == 17


def test_a_part_without_labels_weighs_nothing_and_is_finite() -> None:
    logits, labels = ragged()
    loss = NextToken().loss(logits[1:2], {"labels": labels[1:2]})
    assert (float(loss.sum), int(loss.weight)) == (0.0, 0)


def test_low_precision_logits_are_summed_in_fp32_and_fp64_ones_in_fp64() -> None:
    logits, labels = ragged()
    rounded = logits.bfloat16()
    loss = NextToken().loss(rounded, {"labels": labels})
    assert loss.sum.dtype == torch.float32
    exact = NextToken().loss(rounded.double(), {"labels": labels})
    assert exact.sum.dtype == torch.float64
    assert float(loss.sum) == pytest.approx(float(exact.sum), rel=1e-6)


class Recorder(nn.Module):
    """Remembers what it was called with."""

    def forward(self, *inputs: Any, **named: Any) -> tuple[Any, ...]:
        return *inputs, *named.values()


def test_documents_and_positions_are_passed_on_when_there_are_any() -> None:
    plain, packed = {"tokens": 1, "labels": 2}, {"tokens": 1, "positions": 3, "documents": 4, "labels": 2}
    assert NextToken().forward(Recorder(), plain) == (1,)  # pyrefly: ignore[bad-argument-type]
    assert NextToken().forward(Recorder(), packed) == (1, 3, 4)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_a_mean_of_ones_own_is_weighed_by_samples(size: int) -> None:
    torch.manual_seed(0)
    output, target = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    parts = [
        Supervised(F.mse_loss).loss(some, (None, wanted))
        for some, wanted in zip(output.split(size), target.split(size), strict=True)
    ]
    assert mean(parts) == pytest.approx(float(F.mse_loss(output, target)), rel=1e-12)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_sum_and_weight_of_ones_own_are_taken_as_they_are(size: int) -> None:
    logits, labels = ragged()

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        kept = target != -100
        return F.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()

    parts = [
        Supervised(loss).loss(output, (None, wanted))
        for output, wanted in zip(logits.split(size), labels.split(size), strict=True)
    ]
    whole = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert mean(parts) == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.parametrize("batch", [torch.zeros(2), {"x": 1, "y": 2}, (1, 2, 3), (1,)])
def test_a_batch_that_is_no_pair_is_named_with_what_to_write(batch: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"\(inputs, target\).*{type(batch).__name__}.*write an objective with"
    ):
        Supervised(F.mse_loss).forward(Recorder(), batch)


class Own:
    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss(output.sum(), len(batch))


@pytest.mark.parametrize("given", [Own, Own()])
def test_an_objective_is_taken_as_it_is_or_made_from_its_class(given: Any) -> None:
    assert isinstance(as_objective(given), Own)


@pytest.mark.parametrize("given", [F.cross_entropy, nn.CrossEntropyLoss, nn.CrossEntropyLoss()])
def test_a_loss_of_torch_is_an_objective(given: Any) -> None:
    logits, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    objective: Objective = as_objective(given)
    loss = objective.loss(logits, (None, target))
    assert float(loss.sum) / float(loss.weight) == pytest.approx(float(F.cross_entropy(logits, target)))


def test_what_is_no_objective_is_named_with_what_is() -> None:
    with pytest.raises(TypeError, match=r"3 is no objective: expected a loss function of \(output, target\)"):
        as_objective(3)
