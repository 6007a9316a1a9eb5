"""Which sample is read when: a pure function of (seed, position in the run), with no state and no memory.

Position g of a run is position `g % n` of epoch `g // n`. In each epoch every sample comes once, in an order
of that epoch's own: a keyed permutation of range(n) that is computed per element, never stored.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

# A Feistel network is indistinguishable from a random permutation from 4 rounds on, if its halves are large;
# with halves of 2 or 3 values the mixing of 12 rounds passes the tests for every n from 2 up.
ROUNDS = 12


class SampleIds(NamedTuple):
    """Epoch and dataset index of consecutive samples of a run, both (count,) int64."""

    epoch: Ids
    index: Ids


def sample_ids(seed: int, first: int, count: int, n: int, shuffle: bool = True) -> SampleIds:
    """The samples at positions first, ..., first + count - 1 of a run over a dataset of n samples.

    Resuming is asking for another `first`; a batch may take the end of one epoch and the start of the next.

    Raises:
        ValueError: n is below 1, or first or count is negative.

    Example:
        >>> sample_ids(0, first=4, count=4, n=6, shuffle=False)
        SampleIds(epoch=array([0, 0, 1, 1]), index=array([4, 5, 0, 1]))
    """
    if n < 1 or first < 0 or count < 0:
        raise ValueError(
            f"sample_ids needs n >= 1, first >= 0, count >= 0; got n={n}, first={first}, count={count}"
        )
    epoch, index = np.divmod(np.arange(first, first + count, dtype=np.int64), np.int64(n))
    if shuffle and count:
        for number in range(int(epoch[0]), int(epoch[-1]) + 1):
            span = slice(*np.searchsorted(epoch, (number, number + 1)))
            index[span] = permute(index[span], n, f"order/{seed}/{number}")
    return SampleIds(epoch, index)


def substitute(seed: int, index: int, attempt: int, n: int) -> int:
    """The sample that stands in for a bad one; the first that is good of attempts 1, 2, ...

    Example:
        >>> [substitute(0, 5, attempt, 1000) for attempt in (1, 2)]
        [297, 904]
    """
    digest = hashlib.blake2b(f"substitute/{seed}/{index}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % n


def permute(positions: Ids, n: int, key: str) -> Ids:
    """Where a random permutation of range(n), chosen by `key`, takes each position. Exact for every n >= 1.

    A Feistel network over pairs (left, right) permutes range(a * b), with a and b near sqrt(n); a value that
    lands beyond n is sent through again until it is inside ("cycle walking"), which is rare as a * b is close
    to n. Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.

    Example:
        >>> sorted(permute(np.arange(5), 5, "any key").tolist())
        [0, 1, 2, 3, 4]
    """
    side = math.isqrt(n - 1) + 1
    other = -(-n // side)
    keys = round_keys(key)
    values = _feistel(positions.astype(np.uint64), side, other, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], side, other, keys)
    return values.astype(np.int64)


def round_keys(key: str) -> npt.NDArray[np.uint64]:
    """(ROUNDS,) keys from a name; the same on every machine."""
    return np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * ROUNDS), dtype="<u8").astype(np.uint64)


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """64 well mixed bits from 64 bits, a bijection. Source: the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _feistel(
    values: npt.NDArray[np.uint64], side: int, other: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    left, right = np.divmod(values, np.uint64(other))  # in range(side), range(other)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + mix(right + key) % np.uint64(side)) % np.uint64(side)
        else:
            right = (right + mix(left + key) % np.uint64(other)) % np.uint64(other)
    return left * np.uint64(other) + right
