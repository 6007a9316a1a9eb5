"""Statistics of paired measurements."""

from __future__ import annotations

import numpy as np

from benchmarks.paired import compare


def test_overhead_is_found_under_noise_that_meets_both() -> None:
    generator = np.random.default_rng(1)
    noise = generator.lognormal(0.0, 0.3, size=(60, 1))  # the machine's, by pair
    jitter = generator.normal(1.0, 0.005, size=(2, 60, 5))
    by_hand, product = noise * jitter[0], 1.02 * noise * jitter[1]
    found = compare(product.tolist(), by_hand.tolist())
    assert found.low < 0.02 < found.high
    assert found.high - found.low < 0.01


def test_equal_times_have_no_overhead() -> None:
    assert compare([[1.0, 2.0]] * 5, [[1.0, 2.0]] * 5)[2:] == (0.0, 0.0, 0.0, 5)
