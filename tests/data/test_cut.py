"""The cut: every sample of a global batch belongs to one rank and one micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.cut import cut_for, eval_portions, train_portions
from shoal.plan import Plan
from tests.data.sources import Place

DEGREES = st.integers(1, 3)


@given(replicate=DEGREES, shard=DEGREES, tensor=DEGREES, count=DEGREES, size=DEGREES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_data_ranks_share_out_the_global_batch_and_the_others_read_alike(
    replicate: int, shard: int, tensor: int, count: int, size: int
) -> None:
    plan = Plan(replicate=replicate, shard=shard, tensor=tensor, micro_batch=size)
    global_batch = replicate * shard * count * size
    read: dict[int, list[int]] = {}
    for rank in range(plan.world_size):
        cut = cut_for(plan, Place(rank, plan.world_size), global_batch)
        portions = train_portions(cut, 0, 1000, shuffle=False)(2)
        found = [number for portion in portions for number in portion.index.tolist()]
        assert read.setdefault(plan.data_rank(rank), found) == found
        assert [portion.first for portion in portions] == found[::size]
    whole = sorted(number for found in read.values() for number in found)
    assert whole == list(range(2 * global_batch, 3 * global_batch))


@given(shares=st.lists(DEGREES, min_size=1, max_size=4), count=DEGREES, size=DEGREES)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_rank_of_more_shares_reads_as_many_times_more(shares: list[int], count: int, size: int) -> None:
    plan = Plan(shard=len(shares), micro_batch=size, shares=tuple(shares))
    whole: list[int] = []
    for rank, share in enumerate(shares):
        cut = cut_for(plan, Place(rank, plan.world_size), sum(shares) * count * size)
        portions = train_portions(cut, 0, 1000, shuffle=False)(0)
        assert [len(portion.index) for portion in portions] == [share * size] * count
        whole += [number for portion in portions for number in portion.index.tolist()]
    assert whole == list(range(sum(shares) * count * size))


@given(
    shares=st.lists(DEGREES, min_size=1, max_size=3),
    count=DEGREES,
    size=DEGREES,
    samples=st.integers(1, 40),
    fixed=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_each_held_out_sample_counts_once_and_all_ranks_do_the_same_number_of_micro_batches(
    shares: list[int], count: int, size: int, samples: int, fixed: bool
) -> None:
    ranks = len(shares)
    plan = Plan(shard=ranks, micro_batch=size, shares=tuple(shares))
    global_batch = sum(shares) * count * size
    counted: list[int] = []
    for step in range(-(-samples // global_batch)):
        all_portions = [
            eval_portions(cut_for(plan, Place(rank, ranks), global_batch), samples, fixed)(step)
            for rank in range(ranks)
        ]
        numbers = {len(portions) for portions in all_portions}
        assert len(numbers) == 1 and (numbers == {count} or not fixed)
        for share, portions in zip(shares, all_portions, strict=True):
            for portion in portions:
                assert len(portion.index) == share * size and portion.index.max() < samples
                counted += portion.index[: portion.samples].tolist()
    assert sorted(counted) == list(range(samples))


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the plan \(shard 2 .*\) is for 2 ranks; this is rank 0 of 4"):
        cut_for(Plan(shard=2), Place(0, 4), 8)


@pytest.mark.parametrize(
    ("plan", "batch"),
    [(Plan(replicate=4), 2), (Plan(micro_batch=3), 8), (Plan(shard=3), 8), (Plan(shard=2, shares=(3, 2)), 8)],
)
def test_a_global_batch_that_cannot_be_cut_is_refused(plan: Plan, batch: int) -> None:
    with pytest.raises(ValueError, match=f"train.global_batch = {batch} is not"):
        cut_for(plan, Place(0, plan.world_size), batch)
