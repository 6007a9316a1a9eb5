"""Host memory of a node: what plans keep there, and whether it fits."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cluster import GIB, Cluster
from shoal.config import Settings
from shoal.plan import Plan
from shoal.planner.host import Host
from shoal.planner.memory import OFFLOAD_OPTIMIZER, Fit
from shoal.planner.predict import Prediction, predict
from shoal.planner.search import measure_base, search
from tests.planner.made import made_settings

GPUS = Cluster.parse("2 h100 with 100 GiB")
BATCH_BYTES = 1 << 20  # more than a micro-batch takes on its way


def settings(**checkpoint: Any) -> Settings:
    return made_settings(checkpoint=checkpoint, train={"global_batch": 16, "precision": "bf16"})


def needs(cluster: Cluster = GPUS, *, checkpoint: dict[str, Any] | None = None, **plan: Any) -> Prediction:
    return predict(settings(**(checkpoint or {})), Plan(micro_batch=1, compile=False, **plan), cluster)


def parameters() -> int:
    return measure_base(settings(), GPUS).parameters


def test_moments_in_host_memory_are_eight_bytes_a_parameter_of_all_ranks_together() -> None:
    host = needs(shard=2, offload=("optimizer",)).host
    assert 8 * parameters() <= host.tensors_bytes <= 8 * parameters() + BATCH_BYTES
    assert needs(shard=2).host.tensors_bytes <= BATCH_BYTES
    assert needs(replicate=2, offload=("optimizer",)).host.tensors_bytes >= 16 * parameters()


def test_masters_and_gradients_are_locked_as_powers_of_two() -> None:
    """As torch's allocator of locked memory does: up to twice of what they are, and more than they are."""
    alone = needs(Cluster.parse("1 h100"), offload=("parameters",)).host.tensors_bytes
    assert 8 * parameters() < alone < 2 * 8 * parameters() + BATCH_BYTES


def test_ranks_of_a_pipeline_are_counted_on_the_node_that_has_them() -> None:
    two = needs(Cluster.parse("2x1 h100"), pipeline=2, offload=("optimizer",)).host
    one = needs(pipeline=2, offload=("optimizer",)).host
    assert 4 * parameters() < two.tensors_bytes < one.tensors_bytes
    assert one.tensors_bytes >= 8 * parameters()


def test_copies_for_restarts_are_two_states_and_two_more_of_another_nodes_rank() -> None:
    often = {"memory_every": 1}
    none = needs(shard=2).host
    here, there = (
        needs(shard=2, checkpoint=often).host,
        needs(Cluster.parse("2x1 h100"), shard=2, checkpoint=often).host,
    )
    assert none.copies_bytes == 0
    assert here.copies_bytes == pytest.approx(2 * 12 * parameters(), rel=0.01)  # masters and moments
    assert there.copies_bytes == here.copies_bytes  # twice as many, of half as many ranks
    whole = needs(Cluster.parse("2x1 h100"), replicate=2, checkpoint=often).host
    assert whole.copies_bytes == pytest.approx(
        here.copies_bytes, rel=0.01
    )  # the other node has all that one has


def test_what_does_not_fit_the_host_does_not_fit() -> None:
    small = GPUS.model_copy(update={"host_gib": 8 * parameters() / GIB / 2})
    found = needs(small, shard=2, offload=("optimizer",))
    assert found.worst.verdict.fit is Fit.FITS and found.fit is Fit.NOT
    assert found.lack.startswith("needs ") and "of host memory a node" in found.lack
    assert needs(small, shard=2).fit is Fit.FITS


def test_ranks_on_cpus_share_the_hosts_memory() -> None:
    plenty, scarce = (
        needs(Cluster.parse("2 cpu with 100 GiB"), shard=2),
        needs(Cluster.parse("2 cpu with 0.01 GiB"), shard=2),
    )
    assert plenty.fit is Fit.FITS and scarce.fit is Fit.NOT
    assert scarce.host.needed_bytes == plenty.host.needed_bytes
    assert scarce.host.needed_bytes == 2 * scarce.worst.memory.peak.allocated_bytes
    assert "a smaller plan.micro_batch" not in scarce.worst.verdict.advice  # it is one sample already
    assert OFFLOAD_OPTIMIZER not in scarce.worst.verdict.advice  # to the same memory
    assert scarce.lack


@pytest.mark.parametrize(
    ("needed", "fit"), [(80, Fit.FITS), (95, Fit.TIGHT), (100, Fit.TIGHT), (101, Fit.NOT)]
)
def test_a_host_with_less_than_a_tenth_to_spare_is_tight(needed: int, fit: Fit) -> None:
    assert Host(needed * GIB, 0, 100 * GIB).fit is fit
    assert Host(needed * GIB, 0, None).fit is Fit.FITS
    assert bool(Host(needed * GIB, 0, 100 * GIB).advice) is (fit is not Fit.FITS)


def test_a_search_offers_no_plan_that_moves_more_to_the_host_than_there_is() -> None:
    job = settings()
    base = measure_base(job, GPUS)
    offload = made_settings(train={"global_batch": 16, "precision": "bf16"}, plan={"offload": ["optimizer"]})
    little = GPUS.model_copy(update={"host_gib": 8 * base.parameters / GIB / 2})
    found = search(offload, little, base, most=2)
    assert not found.ranked and found.too_large == found.considered
    assert search(offload, GPUS, base, most=2).ranked
