"""Every plan trains as one process does: equal initial weights, losses, gradient norms and final weights."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch

from shoal.job import Optimizer, Precision
from shoal.plan import Plan
from tests.ranks import Outcome, run_all, run_ranks
from tests.train.toy import BATCH, Record, run_by_hand, run_plan

# fp64 sums in another order differ by about 1e-15 relative a sum; AdamW divides small numbers by small numbers, and
# steps compound. fp32 has 2^29 times less room.
TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32")


def plans(ranks: int) -> dict[str, Plan]:
    if ranks == 1:
        return {"one device": Plan()}
    found = {"replicate": Plan(replicate=ranks)} | {
        f"zero{stage}": Plan.model_validate({"shard": ranks, "zero": stage}) for stage in (1, 2, 3)
    }
    if ranks == 2:
        found |= {
            f"zero{stage} 3:1": Plan.model_validate({"shard": 2, "zero": stage, "shares": (3, 1)})
            for stage in (1, 2, 3)
        }
        found["replicate 1:3"] = Plan(replicate=2, shares=(1, 3))
    if ranks == 4:
        found["hybrid zero2 1:2:2:3"] = Plan(replicate=2, shard=2, zero=2, shares=(1, 2, 2, 3))
        found |= {
            f"hybrid zero{stage}": Plan.model_validate({"replicate": 2, "shard": 2, "zero": stage})
            for stage in (1, 2, 3)
        }
    return found


def cases(ranks: int) -> dict[str, tuple[Plan, Precision]]:
    """Plan and precision by name. More ranks in fp32 do nothing that fewer don't: with 4, only accumulation is left out there."""
    return {
        f"{ranks}-{name}-{accumulation}-{precision}": (
            plan.model_copy(update={"micro_batch": BATCH // plan.all_shares // accumulation}),
            precision,
        )
        for name, plan in plans(ranks).items()
        for accumulation, precision in product((1, 4), PRECISIONS)
        if not (ranks == 4 and accumulation == 4 and precision == "fp32")
        and BATCH % (plan.all_shares * accumulation) == 0
    }


@lru_cache
def trained(ranks: int) -> dict[str, Outcome]:
    return run_all(ranks, run_plan, cases(ranks))


ALL = {name: case for ranks in (1, 2, 4) for name, case in cases(ranks).items()}


@lru_cache
def by_hand(precision: str) -> Record:
    return run_by_hand(DTYPES[precision])


def assert_same(record: Record, reference: Record, tolerance: float) -> None:
    assert record.initial_hash == reference.initial_hash
    assert record.losses == pytest.approx(reference.losses, rel=tolerance)
    assert record.norms == pytest.approx(reference.norms, rel=tolerance)
    for name, weight in reference.weights.items():
        torch.testing.assert_close(
            record.weights[name], weight, rtol=0, atol=tolerance * float(weight.abs().max()), msg=name
        )


@pytest.mark.parametrize("name", ALL)
def test_a_plan_trains_as_one_process_does(name: str) -> None:
    plan, precision = ALL[name]
    for record in trained(plan.world_size)[name].get():
        assert_same(record, by_hand(precision), TOLERANCES[precision])


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(
            name="sgd", lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01, schedule="linear", clip=0.0
        ),
        Optimizer(name="sgd", lr=0.5, momentum=0.0, weight_decay=0.0, schedule="constant", clip=0.2),
        Optimizer(name="adamw", lr=1e-2, schedule="wsd", decay=5, clip=0.0),
        Optimizer(name="adamw", lr=1e-2, betas=(0.6, 0.8), eps=1e-2, clip=0.3),
    ],
    ids=["nesterov", "plain sgd", "wsd without clipping", "other betas and epsilon"],
)
def test_every_optimizer_is_torchs_own(optimizer: Optimizer) -> None:
    plan = Plan(shard=2, zero=2, micro_batch=4)
    steps = 12  # of which the last of `decay` are the rest of a wsd schedule
    reference = run_by_hand(torch.float64, optimizer, steps)
    for record in run_ranks(2, run_plan, plan, "fp64", optimizer, steps):
        assert_same(record, reference, 1e-10)


LOW: tuple[Precision, ...] = ("bf16", "fp16")
SPREAD = {"replicate": Plan(replicate=2), "zero1": Plan(shard=2, zero=1), "zero3": Plan(shard=2, zero=3)}


@lru_cache
def trained_low(ranks: int) -> dict[tuple[str, Precision], Outcome]:
    wanted = {"alone": Plan()} if ranks == 1 else SPREAD
    return run_all(ranks, run_plan, {(name, low): (wanted[name], low) for name, low in product(wanted, LOW)})


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("precision", LOW)
def test_low_precision_is_the_jobs_and_not_the_plans(name: str, precision: Precision) -> None:
    # Both compute in the same low type from the same fp32 masters; only sums over ranks and micro-batches are ordered
    # otherwise. One rounding in bf16 is 2^-9 and in fp16 2^-12, of terms that average out over 16 samples.
    tolerance = {"bf16": 2**-9, "fp16": 2**-11}[precision]
    alone = trained_low(1)["alone", precision].get()[0]
    spread = trained_low(2)[name, precision].get()[0]
    assert spread.initial_hash == alone.initial_hash
    assert spread.losses == pytest.approx(alone.losses, rel=tolerance)
    exact = by_hand("fp32").losses
    assert alone.losses == pytest.approx(exact, rel=2e-2)
    assert alone.losses != exact
