"""Devices of several kinds: faster ones take more samples, and what is told of a step is what simulations of each kind say."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.memory import Fit
from shoal.planner.mixed import Kind, Mixed, parse_mixed, predict_mixed, together
from shoal.planner.predict import predict
from shoal.planner.strategies import words_of
from tests.planner.made import made_settings

PLAN = Plan(shard=2, zero=2, compile=False)


def settings(batch: int = 16, **data: Any) -> Settings:
    tables: dict[str, Any] = {
        "model": {"preset": "1m"},
        "train": {"global_batch": batch, "precision": "bf16"},
    }
    return made_settings(**tables, data={"source": "synthetic", "vocab": 320, "seq_len": 2048} | data)


@pytest.fixture(scope="module")
def found() -> Mixed:
    return predict_mixed(settings(), PLAN, parse_mixed("1 h100 + 1 l40s"))


def test_the_faster_kind_takes_more_of_the_batch_and_the_step_is_shorter(found: Mixed) -> None:
    fast, slow = found.kinds
    assert fast.samples > slow.samples
    assert found.plan.shares == tuple(
        size // (found.plan.micro_batch or 1) for size in (fast.samples, slow.samples)
    )
    count = found.plan.micro_batches(16)[0]
    assert count * (fast.samples + slow.samples) == 16
    assert found.equal_s is not None and found.timing.seconds < found.equal_s
    assert found.fit is Fit.FITS


def test_a_kinds_memory_is_that_of_a_world_of_it_with_such_micro_batches(found: Mixed) -> None:
    for each in found.kinds:
        alone = PLAN.model_copy(update={"micro_batch": each.samples})
        count = found.plan.micro_batches(16)[0]
        cluster = together([one.kind for one in found.kinds], each.kind)
        same = predict(settings(2 * count * each.samples), alone, cluster).ranks[0].memory
        assert each.memory == same


def test_of_one_kind_said_twice_nothing_is_gained_and_the_step_is_the_plans() -> None:
    job = settings(4)
    twice = predict_mixed(job, PLAN, parse_mixed("1 h100 + 1 h100"))
    assert not twice.plan.shares
    alone = predict(job, twice.plan, Cluster.parse("2x1 h100"))
    assert twice.timing.seconds == pytest.approx(alone.timing.seconds, rel=1e-12)
    assert twice.timing.mfu == pytest.approx(alone.timing.mfu)


def test_a_kind_without_memory_for_its_share_gets_less(found: Mixed) -> None:
    free = found.kinds[0]
    (fast, slow), less = parse_mixed("1 h100 + 1 l40s"), free.memory.device_bytes - (64 << 20)
    small = fast.cluster.device.model_copy(update={"memory_bytes": less})
    scarce = predict_mixed(
        settings(), PLAN, [Kind(fast.cluster.model_copy(update={"device": small}), 0), slow]
    )
    assert scarce.kinds[0].samples < free.samples and scarce.fit is not Fit.NOT


def test_shares_that_are_said_are_kept() -> None:
    said = Plan(shard=2, zero=2, compile=False, micro_batch=1, shares=(1, 3))
    kept = predict_mixed(settings(8), said, parse_mixed("1 h100 + 1 l40s"))
    assert kept.plan == said and [each.samples for each in kept.kinds] == [1, 3] and kept.equal_s is None


def test_words_of_the_plan_make_it_again(found: Mixed) -> None:
    words = dict(word[5:].split("=") for word in words_of(found.plan, settings()).split())
    assert words["shares"] == ",".join(map(str, found.plan.shares))
    wide = Plan(shard=16, shares=(3,) * 8 + (1,) * 8)
    assert words_of(wide, settings()) == "plan.shard=16 plan.shares=3x8,1x8"
    assert Plan.model_validate({"shard": 16, "shares": "3x8,1x8"}) == wide


def test_of_equal_devices_the_rank_with_the_largest_share_is_told() -> None:
    job, two = settings(8), Cluster.parse("2 h100")
    plans = [
        Plan(shard=2, zero=2, compile=False, micro_batch=2, shares=shares) for shares in ((1, 3), (3, 1))
    ]
    last, first = (predict(job, plan, two) for plan in plans)
    assert [last.plan, first.plan] == plans
    assert last.worst.memory == first.worst.memory and last.timing.seconds == first.timing.seconds
    assert (
        last.worst.memory.peak.allocated_bytes
        > predict(settings(4), PLAN, two).worst.memory.peak.allocated_bytes
    )


@pytest.mark.parametrize(
    ("cluster", "plan", "batch", "why"),
    [
        ("1 h100 + 1 l40s", Plan(pipeline=2), 16, "plan.pipeline = 2: .* use other axes"),
        (
            "3 h100 + 1 l40s",
            Plan(tensor=2, shard=2),
            16,
            "ranks share samples, and 3 h100 is no whole number",
        ),
        ("1 h100 + 1 l40s", Plan(shard=2, micro_batch=4), 6, "no whole number of micro-batches"),
        ("1 h100 + 1 l40s", Plan(shard=2, expert=2), 16, "plan.expert = 2: rows that one kind gets"),
        ("1 h100 + 1 l40s", Plan(shard=4), 16, "4 ranks, but the cluster has 2 devices"),
    ],
)
def test_what_cannot_be_is_refused(cluster: str, plan: Plan, batch: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        predict_mixed(settings(batch), plan, parse_mixed(cluster))


def test_gpus_and_cpus_do_not_share_a_job() -> None:
    with pytest.raises(ValueError, match="GPUs and CPUs do not share a job"):
        parse_mixed("1 h100 + 2 cpu")


def test_host_memory_is_refused_rather_than_passed_over() -> None:
    with pytest.raises(ValueError, match="host memory is not judged for several kinds; leave it out"):
        parse_mixed("8 h100 with 200 GiB + 8 a100")


def test_nodes_of_unlike_sizes_are_as_small_as_both_allow() -> None:
    kinds = parse_mixed("8 h100 + 4 l40s")
    assert together(kinds, kinds[0]).describe() == "3x4 h100"
    assert together(kinds, kinds[1]).device.memory_bytes == 48 * GIB
