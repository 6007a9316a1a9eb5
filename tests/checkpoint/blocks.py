"""Blocks and parts of a few bytes, so that small tensors have several, as large ones have of 4 and 32 MiB."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.ranks import run_ranks

BLOCK_BYTES = 256


@contextmanager
def small_blocks() -> Generator[None]:
    with (
        patch("shoal.checkpoint.write.BLOCK_BYTES", BLOCK_BYTES),
        patch("shoal.checkpoint.read.BLOCK_BYTES", BLOCK_BYTES),
        patch("shoal.checkpoint.read.PART_BYTES", 2 * BLOCK_BYTES),
        patch("shoal.resilience.saver.BLOCK_BYTES", BLOCK_BYTES),
    ):
        yield


def run_small(n: int, fn: Callable[..., Any], *args: object, timeout: float = 120) -> list[Any]:
    """`run_ranks` with small blocks."""
    return run_ranks(n, _small, fn, args, timeout=timeout)


def _small(world: object, fn: Callable[..., Any], args: tuple[object, ...]) -> Any:
    with small_blocks():
        return fn(world, *args)
