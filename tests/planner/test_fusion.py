"""What a compiler makes of a graph: what is written, what is one kernel, and the bytes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.planner.fusion import QUANTIZING, Fusion

X, Y, W = torch.zeros(64, 32), torch.zeros(64, 32), torch.zeros(32, 32)
SIZE = 64 * 32 * 4


def fusion(function: Callable[..., Any], *args: Tensor) -> Fusion:
    return Fusion(make_fx(function, tracing_mode="fake")(*args).graph)


def names(found: Fusion) -> list[tuple[str, ...]]:
    return [kernel.names for kernel in found.kernels.values()]


def test_a_chain_of_element_wise_operations_is_one_kernel_that_reads_once_and_writes_once() -> None:
    found = fusion(lambda x: ((x + 1) * 2).relu(), X)
    assert [kernel.nbytes for kernel in found.kernels.values()] == [2 * SIZE]
    assert names(found) == [("aten.relu",)]


def test_what_elements_are_put_into_is_written_with_them() -> None:
    """A compiler fills the copy that it puts them into, and has nothing beside it."""
    rows = torch.zeros(64, 1, dtype=torch.long)

    def put(x: Tensor, at: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(1, at, x[:, :1]) * x

    found = fusion(put, X, rows)
    written = [str(node.target) for node in found.nodes if node in found.written]
    assert written == ["aten.scatter_add.default", "aten.mul.Tensor"]
    # what comes from outside is not its to fill
    outside = fusion(lambda x, y, at: y.scatter_add(1, at, x[:, :1]) + y, X, Y, rows)
    assert len(outside.written) == 2


def test_a_norm_and_what_follows_it_is_one_kernel() -> None:
    def norm(x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * 3

    found = fusion(norm, X)
    assert len(found.kernels) == 1
    assert next(iter(found.kernels.values())).nbytes == 2 * SIZE + 64 * 4  # the means are written, too


def test_products_divide_what_is_before_from_what_is_after() -> None:
    found = fusion(lambda x, w: ((x * 2) @ w).relu() + 1, X, W)
    assert names(found) == [("aten.mul",), ("aten.add",)]


def test_results_that_are_read_by_two_products_are_written_once() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return y @ w + y.cos() @ w

    found = fusion(forward, X, W)
    assert [set(kernel) for kernel in names(found)] == [{"aten.sin", "aten.cos"}, {"aten.add"}]
    assert [kernel.nbytes for kernel in found.kernels.values()] == [3 * SIZE, 3 * SIZE]


def test_a_sum_over_rows_is_a_kernel_of_its_own() -> None:
    found = fusion(lambda x, y: ((x * y).sum(0), (x * y).relu()), X, Y)
    assert [kernel.nbytes for kernel in found.kernels.values()] == [2 * SIZE + 32 * 4, 3 * SIZE]


def test_of_a_table_only_the_rows_are_read_that_are_taken() -> None:
    table, rows = torch.zeros(5000, 32), torch.zeros(64, dtype=torch.long)
    found = fusion(lambda table, rows: table[rows] + 1, table, rows)
    assert sum(kernel.nbytes for kernel in found.kernels.values()) < 4 * SIZE


def test_kernels_that_scale_and_cast_to_8_bits_take_longer_than_their_bytes() -> None:
    def cast(x: Tensor) -> Tensor:
        return (x * (448 / x.abs().amax())).to(torch.float8_e4m3fn)

    quantizing = [kernel.times for kernel in fusion(cast, X).kernels.values()]
    assert quantizing and set(quantizing) == {QUANTIZING}
    assert {kernel.times for kernel in fusion(lambda x: x.abs().amax(-1), X).kernels.values()} == {1.0}
