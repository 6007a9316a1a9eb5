"""Tests run on the CPU, also where there are GPUs: ranks are more than a machine has of them."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # before torch is imported
