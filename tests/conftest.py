"""Tests run on the CPU, also where there are GPUs: ranks are more than a machine has of them."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before torch is imported


@pytest.fixture
def warm_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches begin with torch imported. How they begin otherwise is for tests that start programs."""
    from shoal.launch.ranks import Ranks
    from tests.launch.warm import start

    monkeypatch.setattr(Ranks, "start", start)
