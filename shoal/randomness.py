"""Global random numbers, Python's, numpy's and torch's, as functions of names."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed_random(key: str) -> None:
    """Seed Python's, numpy's and torch's (CPU) global random numbers from a name."""
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype="<u4"))
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@contextmanager
def random_state_kept() -> Generator[None]:
    """Undo what the block does to the global random numbers (CPU)."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
