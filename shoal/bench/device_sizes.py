"""What `shoal bench device` measures: the shapes and sizes that transformers have, smaller ones on CPUs."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

KIB, MIB = 1024, 1024**2


class Shape(NamedTuple):
    """Of causal attention."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int


class Sizes(NamedTuple):
    """By rising cost within each."""

    products: dict[str, list[tuple[int, int, int]]]
    """dtype of the inputs: (m, n, k) of (m x k) by (k x n)"""
    attention: list[Shape]
    attention_dtype: str
    moves: list[int]
    """bytes read and written"""
    copies: list[int]
    """bytes from the host"""
    collectives: list[int]
    """bytes of the whole tensor"""
    dtype: str
    """of moves and collectives"""
    large: int
    """rows and columns of the matrices that are multiplied beside a collective"""
    gathered: int
    """bytes that are gathered meanwhile"""


def _by_work(shapes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))


# (n, k): parts of tensor parallelism, key-value heads, small models, then 8B and 70B; the weights' gradients have n and k of a
# model as m and n, and the tokens as k
_WEIGHTS = [
    *((512, 2048), (512, 4096), (1024, 1024), (1024, 4096), (2048, 2048), (4096, 1024), (8192, 2048)),
    *((2048, 8192), (4096, 4096), (4096, 14336), (14336, 4096), (4096, 16384), (8192, 8192), (16384, 8192)),
]
_TOKENS = [1024, 2048, 4096, 8192, 16384]
_GRID = [(m, n, k) for m, (n, k) in product(_TOKENS, _WEIGHTS)]
_HEAD = [(1024, 128256, 2048), (4096, 128256, 4096), (128256, 4096, 4096)]

ON_GPU = Sizes(
    products={
        "bfloat16": _by_work(_GRID + _HEAD),
        "float8_e4m3fn": _by_work([shape for shape in _GRID if shape[0] >= 2048]),
        "float32": _by_work(
            [(m, n, k) for m, (n, k) in product((1024, 4096), _WEIGHTS) if max(n, k) <= 8192]
        ),
    },
    attention=[
        *(Shape(8, 12, 12, 1024, 64), Shape(4, 16, 4, 2048, 64), Shape(1, 32, 8, 2048, 128)),
        *(Shape(4, 32, 8, 2048, 64), Shape(2, 32, 8, 2048, 128), Shape(1, 8, 2, 8192, 128)),
        *(Shape(1, 32, 8, 4096, 128), Shape(1, 32, 32, 4096, 128), Shape(4, 32, 8, 4096, 64)),
        *(Shape(1, 64, 8, 4096, 128), Shape(1, 32, 8, 8192, 128), Shape(1, 32, 8, 16384, 128)),
    ],
    attention_dtype="bfloat16",
    moves=[2**power for power in range(15, 31)],
    copies=[2**power for power in range(16, 29, 2)],
    collectives=[2**power for power in (14, 16, 18, 20, 22, 24, 26, 28, 30)],
    dtype="bfloat16",
    large=8192,
    gathered=256 * MIB,
)

ON_CPU = Sizes(
    products={
        "float32": _by_work(list(product((64, 256), (64, 256, 1024), (64, 256)))),
        "bfloat16": [
            (64, 64, 64),
            (128, 128, 128),
            (256, 256, 256),
        ],  # very slow on CPUs without units for it
    },
    attention=[Shape(2, 4, 2, 64, 16), Shape(2, 4, 4, 128, 32), Shape(2, 8, 2, 256, 32)],
    attention_dtype="float32",
    moves=[2**power for power in range(15, 26, 2)],
    copies=[2**power for power in range(16, 23, 3)],
    collectives=[2**power for power in (12, 14, 16, 18, 20, 22)],
    dtype="float32",
    large=256,
    gathered=1 * MIB,
)


def sizes_for(device_type: str) -> Sizes:
    """Those of GPUs, or of CPU ranks."""
    return ON_CPU if device_type == "cpu" else ON_GPU
