"""Tests run on the CPU, also where there are GPUs: ranks are more than a machine has of them."""

from __future__ import annotations

import os
import random

import pytest

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before torch is imported


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random numbers of a test are the same ones whatever ran before it, in whichever process."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def warm_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches begin with torch imported. How they begin otherwise is for tests that start programs."""
    from shoal.launch.ranks import Ranks
    from tests.launch.warm import start

    monkeypatch.setattr(Ranks, "start", start)
