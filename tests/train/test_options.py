"""What a plan may trade for memory or speed changes no number; what a job asks of its data changes what attention sees."""

from __future__ import annotations

import pytest

from shoal.plan import Plan
from tests.ranks import run_ranks
from tests.train.test_parity import assert_same, by_hand
from tests.train.toy import run_plan


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(replicate=2), Plan(shard=2, zero=3, micro_batch=4)],
    ids=["alone", "replicate", "zero3"],
)
def test_recomputing_changes_no_number(plan: Plan) -> None:
    plan = plan.model_copy(update={"recompute": "full"})
    for record in run_ranks(plan.world_size, run_plan, plan, "fp64"):
        assert_same(record, by_hand("fp64"), 1e-10)


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(shard=2, zero=2)], ids=["replicate", "zero2"])
def test_compiling_changes_no_number(plan: Plan) -> None:
    plan = plan.model_copy(update={"compile": True})
    for record in run_ranks(2, run_plan, plan, "fp32", timeout=280):
        assert_same(record, by_hand("fp32"), 2e-5)  # fused kernels round once where eager ones round twice


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_recomputing_in_low_precision_sees_the_same_casts(precision: str) -> None:
    kept, recomputed = (
        run_ranks(1, run_plan, Plan.model_validate({"recompute": recompute}), precision)[0]
        for recompute in ("none", "full")
    )
    assert recomputed.losses == kept.losses
