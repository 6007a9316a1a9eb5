"""What can be trained can be planned: the jobs that come with shoal, models of transformers, convolutions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.cluster import Cluster
from shoal.config import load
from shoal.plan import Plan
from shoal.planner.launch import cost_of
from shoal.planner.memory import Fit
from shoal.planner.predict import predict

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.toml"))
aten = torch.ops.aten


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_examples_job_can_be_planned_on_gpus_and_cpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load(f"examples/{name}", [])
    for cluster in ("2 h100", "2 cpu"):
        found = predict(job, Plan(shard=2, micro_batch=1, compile=False), Cluster.parse(cluster))
        assert found.fit is Fit.FITS and found.timing.seconds > 0


def test_blocks_of_a_model_of_transformers_can_be_planned_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load("examples/huggingface.toml", [])
    found = predict(job, Plan(shard=2, micro_batch=1, compile=True), Cluster.parse("2 h100"))
    assert found.fit is Fit.FITS and found.timing.seconds > 0


@pytest.mark.parametrize("asked", [(True, True, True), (False, True, True), (False, True, False)])
def test_a_convolutions_backward_is_counted_for_the_gradients_that_are_asked_for(
    asked: tuple[bool, bool, bool],
) -> None:
    """Each of those of the input and of the weight takes as many operations as forward."""
    x, weight = torch.empty(2, 3, 8, 8, device="meta"), torch.empty(5, 3, 3, 3, device="meta")
    forward = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(*forward)
    one = cost_of(aten.convolution.default, forward, {}, [torch.empty(out.shape)])
    assert one is not None and one.flops == 2 * 2 * 5 * 8 * 8 * 3 * 9
    real = [
        torch.empty(shape) for shape, want in zip((x.shape, weight.shape, (5,)), asked, strict=True) if want
    ]
    args = (out, x, weight, [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, list(asked))
    back = cost_of(aten.convolution_backward.default, args, {}, real)
    assert back is not None and back.flops == sum(asked[:2]) * one.flops
