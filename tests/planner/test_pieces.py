"""Parts of parameters that are not made change nothing in a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal.planner.simulate as simulate_module
from shoal.cluster import Cluster
from shoal.plan import Plan
from shoal.planner.launch import Launch
from shoal.planner.pieces import Pieces, _Torch
from shoal.planner.simulate import simulate
from shoal.planner.trace import Trace
from tests.planner.real import batch, dense, work


def record(found: Trace) -> list[tuple[Any, ...]]:
    """All that happens, in order."""
    return [
        (event.kind, event.stream, event.operator, event.nbytes, event.moment, event.name)
        if isinstance(event, Launch)
        else (event >= 0, found.storages[event if event >= 0 else ~event].nbytes, moment)
        for event, moment in zip(found.events, found.moments, strict=True)
    ]


def test_cutting_along_a_later_dim_is_recorded_as_if_all_parts_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 ranks cut keys' 32 rows along their columns, which are gathered and reduced in another order."""
    plan, cluster = Plan(shard=64, compile=False), Cluster.parse("8x8 h100")
    small = work(dense)._replace(batch=lambda _plan, _rank, step: batch(Plan(), 0, step))
    joined: list[int] = []
    cat = _Torch.cat

    def counted(tensors: Any, dim: int = 0, *, out: Any = None) -> Any:
        joined.append(isinstance(tensors, Pieces))
        return cat(tensors, dim, out=out)

    monkeypatch.setattr(_Torch, "cat", staticmethod(counted))
    quick = record(simulate(small, plan, cluster, steps=1))
    assert any(joined), "nothing was cut along a later dim"
    monkeypatch.setattr(simulate_module, "simulate_pieces", lambda _undo: None)
    assert quick == record(simulate(small, plan, cluster, steps=1))


@pytest.mark.parametrize(("dim", "other"), [(1, 0), (0, 1)])
def test_parts_are_joined_to_the_shape_that_torch_gives(dim: int, other: int) -> None:
    x = torch.zeros(8, 12)
    torch_like = _Torch()
    quick = torch_like.cat(torch_like.chunk(x, 4, dim), other)
    assert quick.shape == torch.cat(torch.chunk(x, 4, dim), other).shape
    uneven = torch_like.chunk(x, 5, dim)
    assert not isinstance(uneven, Pieces)
