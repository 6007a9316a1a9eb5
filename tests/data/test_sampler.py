"""The order of samples: exact, well mixed, and a function of the position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.sampler import permute, sample_ids


@given(n=st.integers(1, 3000), key=st.text(max_size=8))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_epoch_has_every_sample_once(n: int, key: str) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@pytest.mark.parametrize("n", range(1, 70))
def test_small_datasets_are_permuted_exactly_too(n: int) -> None:
    assert sorted(permute(np.arange(n), n, "key").tolist()) == list(range(n))


@given(n=st.integers(2**40, 2**61), start=st.integers(0, 2**40 - 1000))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_dataset_of_any_size_needs_no_memory(n: int, start: int) -> None:
    found = permute(np.arange(start, start + 1000), n, "key")
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0 and found.max() < n


@pytest.mark.parametrize("n", [2, 3, 5, 10, 64])
def test_every_sample_is_as_likely_at_every_position(n: int) -> None:
    keys = 2000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), permute(np.arange(n), n, str(key))] += 1
    chi_square = float(((counts - keys / n) ** 2 / (keys / n)).sum())
    degrees = (n - 1) ** 2
    # The keys are fixed, so this never varies; 5 standard deviations leave room for a change of the rounds.
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    n = 100_000
    order = permute(np.arange(n), n, "key")
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() / (n / 3) - 1) < 0.02  # the mean distance of two random places is n / 3
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.02


@given(
    n=st.integers(1, 200),
    first=st.integers(0, 500),
    cuts=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    shuffle=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_order_does_not_depend_on_how_it_is_cut(
    n: int, first: int, cuts: list[int], shuffle: bool
) -> None:
    whole = sample_ids(7, first, sum(cuts), n, shuffle)
    starts = first + np.cumsum([0, *cuts[:-1]])
    parts = [sample_ids(7, int(start), count, n, shuffle) for start, count in zip(starts, cuts, strict=True)]
    assert np.array_equal(whole.epoch, np.concatenate([part.epoch for part in parts]))
    assert np.array_equal(whole.index, np.concatenate([part.index for part in parts]))


def test_a_batch_may_take_the_end_of_one_epoch_and_the_start_of_the_next() -> None:
    ids = sample_ids(0, first=6, count=10, n=8)
    assert ids.epoch.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert sorted(ids.index[2:].tolist()) == list(range(8))


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = {
        tuple(sample_ids(seed, epoch * 50, 50, 50).index.tolist()) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert sample_ids(3, 0, 5, 4, shuffle=False).index.tolist() == [0, 1, 2, 3, 0]


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert sample_ids(0, 0, 12, 12).index.tolist() == [7, 4, 6, 11, 1, 0, 8, 10, 9, 2, 3, 5]


@pytest.mark.parametrize(("first", "count", "n"), [(-1, 1, 1), (0, -1, 1), (0, 1, 0)])
def test_impossible_ranges_are_refused(first: int, count: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, first={first}, count={count}"):
        sample_ids(0, first, count, n)
