"""Planted mistakes are found and named, right code is never accused, and the small copy has all that the job has."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import Settings, load, parse
from shoal.models.presets import resolve
from shoal.plan import Plan
from shoal.verify import run
from shoal.verify.compare import SLACK, Comparison, Difference, compare, rounding
from shoal.verify.record import Record
from shoal.verify.run import Verdict, ends_and_experts, every_plan, verify
from shoal.verify.shrink import MOST_RANKS, STEPS, shrink, shrink_plan
from tests.ranks import run_ranks
from tests.verify import faults
from tests.verify.faults import record_with

JOB = Path(__file__).parents[2] / "examples" / "quickstart.toml"
pytestmark = pytest.mark.usefixtures("warm_nursery")


@functools.cache
def alone_record(toml: str) -> Record:
    """One device's, which plans that make the same small copy share."""
    return run_ranks(1, record_with, Settings.from_toml(toml), None)[0]


def compared(
    plan: Plan, fault: Callable[[], Any] | None, precision: str = "fp32", seed: int = 0, steps: int = STEPS
) -> Comparison:
    """A plan, perhaps with a mistake in it, against one device."""
    said = load(JOB, [f"train.precision={precision}", f"train.seed={seed}"])
    settings, small = shrink(said, plan, steps)
    alone = Plan(micro_batch=small.micro_batch, compile=False)
    one = alone_record(settings.with_plan(alone).to_toml())
    wide = settings.model_copy(update={"train": settings.train.model_copy(update={"precision": "fp64"})})
    exact = alone_record(wide.with_plan(alone).to_toml())
    found: Record = run_ranks(plan.world_size, record_with, settings.with_plan(small), fault)[0]
    return compare(exact, one, found, rounding(settings, small))


FAULTS = [
    (Plan(shard=2), faults.missing_reduction, "gradient of"),
    (Plan(shard=2), faults.wrong_weight, "gradient of"),
    (Plan(replicate=2), faults.wrong_weight, "gradient of"),
    (Plan(tensor=2), faults.norm_counted_twice, "gradient norm"),
    (Plan(replicate=2, shard=2), faults.norm_counted_twice, "gradient norm"),
    (Plan(tensor=2), faults.norm_weight_not_summed, "gradient of"),
    (Plan(context=2), faults.wrong_positions, "gradient of"),
    (Plan(context=2, context_by="all_to_all"), faults.wrong_positions, "gradient of"),
]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize(
    ("plan", "fault", "named"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_mistake_is_found_in_the_first_step(
    plan: Plan, fault: Callable[[], Any], named: str, precision: str
) -> None:
    found = compared(plan, fault, precision)
    assert found.first is not None
    assert found.first.step == 1 and found.first.what.startswith(named)
    assert found.first.error > 3 * found.first.tolerance


def test_an_update_that_a_rank_leaves_out_is_found_in_the_weights() -> None:
    found = compared(Plan(shard=2), faults.update_skipped, steps=1)
    assert found.first is not None and found.first.what.startswith("weight ")


def test_a_norms_weight_is_named_where_it_is_the_culprit() -> None:
    found = compared(Plan(tensor=2), faults.norm_weight_not_summed)
    assert found.first is not None and "norm.weight" in found.first.what


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(context=2), Plan(pipeline=2), Plan(shard=2)])
def test_right_code_is_not_accused(plan: Plan, precision: str) -> None:
    found = compared(plan, None, precision, seed=5)
    assert found.same, found.first


def test_plans_are_compared_by_launches_of_their_own() -> None:
    told: list[str] = []
    plans = [Plan(shard=2), Plan(replicate=2, tensor=2), Plan(tensor=2)]
    verdicts = verify(load(JOB), plans, lambda verdict: told.append(verdict.plan.describe()), steps=2)
    assert [verdict.same for verdict in verdicts] == [True, True, True]
    assert [verdict.plan.world_size for verdict in verdicts] == [2, 4, 2] and len(told) == 3


def test_a_job_in_bf16_is_compared_in_fp32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that only the sharper comparison shows is the plan's verdict."""
    real, seen = run.compare, []

    def accuse(
        exact: Record, one: Record, found: Record, allowed: float, *, buffers: bool, jumps: bool
    ) -> Comparison:
        seen.append(allowed)
        result = real(exact, one, found, allowed)
        mistake = Difference("loss", 1, 1.0, 0.1) if len(seen) == 2 else None
        return result._replace(first=mistake)

    monkeypatch.setattr(run, "compare", accuse)
    verdict = verify(load(JOB, ["train.precision=bf16"]), [Plan(shard=2)], steps=2)[0]
    assert len(seen) == 2 and seen[1] < seen[0] / 100  # the second is the sharper one
    assert verdict.comparison is not None and verdict.comparison.first is not None
    assert not verdict.same
    assert verdict.sharper is not None  # and what both were allowed is known
    assert verdict.comparison.allowed.loss > 100 * verdict.sharper.allowed.loss > 0


def test_a_plan_that_fails_says_why() -> None:
    settings = parse(
        {
            "model": {"family": "tests.train.dropout:build"},
            "data": {"source": "tests.train.dropout:dataset"},
            "train": {"objective": "tests.train.dropout:loss"},
        },
        where="test",
    )
    verdict = verify(settings, [Plan(tensor=2)])[0]
    assert not verdict.same and "no layout" in verdict.problem


def test_what_depends_on_micro_batches_is_said_and_what_cannot_be_exact_is_named() -> None:
    def one(loss: str, family: str = "tests.verify.moody:plain") -> Verdict:
        tables = {
            "model": {"family": family},
            "data": {"source": "tests.train.dropout:dataset"},
            "train": {"objective": f"tests.verify.moody:{loss}"},
        }
        return verify(parse(tables, where="test"), [Plan(replicate=2)], steps=1)[0]

    assert one("mean").same and not one("mean").depends
    weighted = one("weighted")
    assert weighted.same  # with micro-batches as they are
    assert weighted.depends.startswith(
        "numbers depend on plan.micro_batch, on one device already: the first loss is "
    )
    assert one("mean", "tests.train.dropout:build").depends
    narrow = one("narrow")
    assert not narrow.same and narrow.comparison is None
    assert "one device cannot compute it in fp64" in narrow.problem and "moody.py" in narrow.problem


def test_a_plan_that_fails_is_told_and_the_others_are_judged() -> None:
    settings = parse(
        {
            "model": {"family": "tests.verify.moody:build"},
            "data": {"source": "tests.train.dropout:dataset"},
            "train": {"objective": "tests.train.dropout:loss"},
        },
        where="test",
    )
    before, failed, after = verify(settings, [Plan(replicate=2), Plan(tensor=2), Plan(shard=2)], steps=1)
    assert "not today" in failed.problem and not failed.refused and failed.comparison is None
    assert "logs, statuses" not in failed.problem  # they are gone with the folder
    for verdict in (before, after):
        assert verdict.comparison is not None, verdict.problem


@pytest.mark.parametrize("plan", list(every_plan(8, tied=False))[::17], ids=lambda plan: plan.describe())
@pytest.mark.parametrize("preset", ["2m", "8b"])
def test_the_small_copy_is_one_that_can_be_run(plan: Plan, preset: str) -> None:
    said = load(JOB, [f"model.preset={preset}", "model.tied=false"])
    settings, small = shrink(said, plan)
    check(settings.job, small, Cluster.parse("8 cpu"))
    before, after = (resolve(one.model, one.data.vocab) for one in (said, settings))
    assert (before.kv_heads < before.heads) == (after.kv_heads < after.heads)
    assert before.tied == after.tied
    assert after.dim <= 128 and settings.train.global_batch <= 64
    assert small.model_dump(exclude={"micro_batch", "compile"}) == plan.model_dump(
        exclude={"micro_batch", "compile"}
    )


@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=64, shard=8, tensor=8),
        Plan(pipeline=16, tensor=8),
        Plan(shard=7),
        Plan(replicate=9, shard=5),
    ],
)
def test_a_large_plan_keeps_its_axes(plan: Plan) -> None:
    small = shrink_plan(plan)
    assert small.world_size <= MOST_RANKS
    kept = [axis for axis in ("pipeline", "tensor") if getattr(plan, axis) > 1]
    assert all(getattr(small, axis) > 1 for axis in kept)


def test_of_shares_that_are_uneven_uneven_ones_are_left() -> None:
    assert shrink_plan(Plan(shard=16, shares=(3,) * 8 + (1,) * 8)).shares == (2, *[1] * 7)
    assert shrink_plan(Plan(shard=2, shares=(5, 5))).shares == ()
    assert shrink_plan(Plan(pipeline=8, replicate=2, shares=(1, 4))).shares == (2, 1)


def test_a_plan_that_loses_an_axis_loses_what_was_said_of_it() -> None:
    small = shrink_plan(Plan(replicate=2, pipeline=7, schedule="zbv"))
    assert (small.pipeline, small.schedule) == (1, "1f1b")
    assert Plan.model_validate(small.model_dump()) == small


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_every_plan_is_each_way_once(ranks: int) -> None:
    plans = list(every_plan(ranks, tied=True))
    assert len(plans) == len({plan.model_dump_json() for plan in plans})
    assert all(math.prod((p.pipeline, p.replicate, p.shard, p.context, p.tensor)) == ranks for p in plans)
    assert not any(plan.schedule in ("zbv", "dualpipev") for plan in plans)


def test_plans_of_a_transformers_mixture_share_its_experts_and_compute_what_one_device_does() -> None:
    pytest.importorskip("transformers")
    from tests.models import hf_toy

    settings = load(JOB, [f"model={{family = 'hf:{hf_toy.folder_of('mixtral')}'}}"])
    plans = list(every_plan(2, **ends_and_experts(settings)))
    assert {plan.expert for plan in plans if plan.shard == 2} == {1, 2}
    shared = next(plan for plan in plans if plan.expert == 2 and plan.zero == 3 and plan.shard == 2)
    assert verify(settings, [shared], steps=1)[0].same


def test_settings_for_one_device_are_the_same_job() -> None:
    settings, small = shrink(load(JOB), Plan(pipeline=2, shard=2))
    assert isinstance(settings, Settings)
    assert small.micro_batches(settings.train.global_batch)[0] >= small.stages


def test_what_is_allowed_is_told_of_the_number_that_is_furthest_off() -> None:
    def with_error(error: float) -> Record:
        parts = {"a": torch.tensor([1.0 + error, 0.0]), "b": torch.tensor([1.0, 0.0])}
        return Record("", [1.0 + error], [1.0], [parts], parts, {})

    found = compare(with_error(0.0), with_error(0.01), with_error(0.02), 1e-3)
    assert found.same
    allowed = (SLACK * 0.011, SLACK * 0.001, SLACK * 0.011, SLACK * 0.011)
    assert found.allowed == pytest.approx(allowed, rel=1e-4)


def test_where_tokens_may_go_to_other_experts_one_devices_largest_error_counts() -> None:
    def with_errors(first: float, second: float) -> Record:
        parts = {"a": torch.tensor([1.0 + first, 0.0]), "b": torch.tensor([1.0 + second, 0.0])}
        return Record("", [1.0], [1.0], [parts], parts, {})

    exact, one, plan = with_errors(0.0, 0.0), with_errors(0.01, 0.0), with_errors(0.0, SLACK * 0.008)
    strict, loose = (compare(exact, one, plan, 1e-6, jumps=jumps) for jumps in (False, True))
    assert strict.first is not None and strict.first.what == "gradient of 'b'"
    assert loose.same
    assert not compare(exact, one, with_errors(0.0, SLACK * 0.011), 1e-6, jumps=True).same
