"""Cross-entropy by kernels is torch's, its gradient as well."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel.sums import has_triton
from shoal.train import entropy
from shoal.train.objective import NextToken

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or not has_triton(), reason="a GPU's kernels")


def made(rows: int, width: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows + width)
    logits = (torch.randn(rows, width, generator=draw) * 4).to(kind)
    labels = torch.randint(0, width, (rows,), generator=draw)
    labels[::5] = -100
    return logits, labels


@needs_gpu
@pytest.mark.parametrize("kind", entropy.KINDS)
@pytest.mark.parametrize(("rows", "width"), [(7, 5), (64, 512), (33, 8193), (20, 128_256)])
def test_it_is_torchs(rows: int, width: int, kind: torch.dtype) -> None:
    logits, labels = made(rows, width, kind)
    wide = logits.double().requires_grad_()
    truth = F.cross_entropy(wide, labels, reduction="sum")
    truth.backward(torch.tensor(0.37, dtype=torch.float64))
    mine = logits.cuda().requires_grad_()
    found = entropy.cross_entropy_sum(mine, labels.cuda())
    found.backward(torch.tensor(0.37, device="cuda"))
    assert wide.grad is not None and mine.grad is not None
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)  # sums in fp32
    # and the gradient's own type
    torch.testing.assert_close(mine.grad.cpu().double(), wide.grad, rtol=4 * torch.finfo(kind).eps, atol=1e-6)
    assert not mine.grad[::5].any()


@needs_gpu
def test_what_is_infinite_is_as_in_torch() -> None:
    logits, labels = made(16, 20_000, torch.bfloat16)
    labels[:] = 3
    logits[0, 10_000:] = -torch.inf  # masked words
    logits[1, :9_000] = -torch.inf  # a whole block, and the label's own: an infinite loss
    logits[2, 5] = torch.inf
    logits[3, 7] = torch.nan
    found = [entropy.cross_entropy_sum(row[None].cuda(), labels[:1].cuda()).item() for row in logits]
    right = [F.cross_entropy(row[None].double(), labels[:1]).item() for row in logits]
    assert found == pytest.approx(right, rel=1e-5, nan_ok=True)


@needs_gpu
def test_a_label_outside_of_the_vocabulary_is_not_a_number() -> None:
    logits, labels = made(4, 512, torch.float32)
    for label in (512, 10**6, -1):
        labels[1] = label
        mine = logits.cuda().requires_grad_()
        total = entropy.cross_entropy_sum(mine, labels.cuda())
        total.backward()
        assert total.isnan() and mine.grad is not None
        # so that the step is skipped, and says why
        assert mine.grad[1].isnan().all() and mine.grad[2:].isfinite().all()


@needs_gpu
def test_rows_may_be_apart_and_so_may_labels() -> None:
    wide, labels = made(64, 1000, torch.bfloat16)
    apart = labels[:, None].repeat(1, 3).cuda()[:, 1]
    truth = F.cross_entropy(wide[:, :900].double(), labels.where(labels < 900, -100), reduction="sum")
    found = entropy.cross_entropy_sum(wide.cuda()[:, :900], apart.where(apart < 900, -100).expand(64))
    assert found.item() == pytest.approx(truth.item(), rel=1e-5)


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="10 labels for 8 rows of logits"):
        entropy.cross_entropy_sum(torch.zeros(8, 16), torch.zeros(10, dtype=torch.long))
    with pytest.raises(TypeError, match=r"labels are torch.float32: expected int64"):
        entropy.cross_entropy_sum(torch.zeros(8, 16), torch.zeros(8))


@needs_gpu
def test_the_objective_takes_it_and_gives_what_it_gives_on_a_cpu() -> None:
    logits, labels = made(64, 1000, torch.bfloat16)
    batch = {"labels": labels.view(4, 16)}
    here = NextToken().loss(logits.view(4, 16, -1), batch)
    batch = {"labels": batch["labels"].cuda()}
    there = NextToken(compiled=True).loss(logits.view(4, 16, -1).cuda(), batch)
    assert there.sum.item() == pytest.approx(here.sum.item(), rel=1e-5)
    assert there.weight == here.weight


def test_kernels_are_for_gpus() -> None:
    assert not entropy.takes(torch.zeros(2, 3))
