"""The replay of the caching allocator follows its rules: rounding, pools, best fit, splitting and joining."""

from __future__ import annotations

import random

import pytest

from shoal.planner.allocator import MIB, CachingAllocator


def test_a_request_is_rounded_to_512_bytes_and_a_small_one_comes_from_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 1, stream=0)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate("b", MIB, stream=0)
    assert (allocator.allocated, allocator.reserved) == (MIB + 512, 2 * MIB)


@pytest.mark.parametrize(("request_mib", "segment_mib"), [(2, 20), (9, 20), (10, 10), (11, 12), (33, 34)])
def test_large_requests_come_from_20_mib_segments_and_the_largest_from_their_own(
    request_mib: int, segment_mib: int
) -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", request_mib * MIB, stream=0)
    assert allocator.reserved == segment_mib * MIB


def test_a_block_whose_rest_is_at_most_1_mib_is_not_split_and_counts_whole() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 11 * MIB, stream=0)  # of a segment of 12 MiB
    assert allocator.allocated == 12 * MIB
    allocator.allocate("b", 18 * MIB + 512, stream=0)  # of 20 MiB: the rest is more than 1 MiB
    assert allocator.allocated == 12 * MIB + 18 * MIB + 512


def test_freed_memory_is_kept_and_used_again_by_best_fit() -> None:
    allocator = CachingAllocator()
    for key, size in (("a", 40), ("b", 20), ("c", 30)):
        allocator.allocate(key, size * MIB, stream=0)
    for key in "abc":
        allocator.free(key)
    assert (allocator.allocated, allocator.reserved) == (0, 90 * MIB)
    allocator.allocate("d", 25 * MIB, stream=0)  # from c's, the smallest that is large enough
    allocator.allocate("e", 40 * MIB, stream=0)
    assert allocator.reserved == 90 * MIB


def test_neighbours_that_are_free_become_one_block() -> None:
    allocator = CachingAllocator()
    for key in "abcd":
        allocator.allocate(key, 5 * MIB, stream=0)
    assert allocator.reserved == 20 * MIB
    for key in "acb":
        allocator.free(key)
    allocator.allocate("e", 15 * MIB, stream=0)
    assert allocator.reserved == 20 * MIB


def test_streams_do_not_share_memory() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 30 * MIB, stream=0)
    allocator.free("a")
    allocator.allocate("b", 30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB


def test_a_segment_that_grows_wastes_no_gap_between_sizes() -> None:
    fixed, growing = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (fixed, growing):
        allocator.allocate("a", 40 * MIB, stream=0)
        allocator.free("a")
        allocator.allocate("b", 60 * MIB, stream=0)
    assert fixed.reserved == 100 * MIB
    assert growing.reserved == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_nothing_is_lost_however_requests_come(expandable: bool) -> None:
    draw, allocator, held = random.Random(0), CachingAllocator(expandable), {}
    for number in range(3000):
        if held and draw.random() < 0.5:
            key = draw.choice(list(held))
            allocator.free(key)
            del held[key]
        else:
            held[number] = int(2 ** draw.uniform(0, 26))
            allocator.allocate(number, held[number], stream=draw.randrange(2))
        assert sum(held.values()) <= allocator.allocated <= allocator.reserved
        assert allocator.allocated == sum(allocator.size_of(key) for key in held)
    for key in held:
        allocator.free(key)
    assert allocator.allocated == 0
    if expandable:  # all is one free block again, for each pool
        assert all(len(free) <= 1 for free in allocator._free.values())


def test_no_bytes_take_nothing() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 0, stream=0)
    allocator.free("a")
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@pytest.mark.parametrize(("expandable", "left_mib"), [(False, 40), (True, 40)])
def test_what_is_free_is_given_back_in_segments_or_pages(expandable: bool, left_mib: int) -> None:
    """Of segments of 40, 60 and 20 MiB the first is in use."""
    allocator = CachingAllocator(expandable)
    for key, size in (("a", 40), ("b", 60), ("c", 20)):
        allocator.allocate(key, size * MIB, stream=0)
    allocator.free("b")
    allocator.free("c")
    assert allocator.reserved == 120 * MIB
    allocator.give_back()
    assert allocator.reserved == left_mib * MIB
    allocator.allocate("d", 60 * MIB, stream=0)
    assert allocator.reserved == (left_mib + 60) * MIB
    for key in ("a", "d"):
        allocator.free(key)
    allocator.give_back()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_a_segment_of_which_a_part_is_in_use_stays() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 2 * MIB, stream=0)
    allocator.allocate("b", 2 * MIB, stream=0)
    allocator.free("a")
    allocator.give_back()
    assert allocator.reserved == 20 * MIB
    allocator.allocate("c", 2 * MIB, stream=0)
    assert allocator.reserved == 20 * MIB
