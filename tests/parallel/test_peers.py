"""What goes by the memory of other ranks has the bits of what goes by collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal.parallel.direct as direct
import shoal.parallel.exchange as exchange
from shoal.job import Precision
from shoal.parallel.peers import cuts, find_peers
from shoal.parallel.sums import BLOCK
from shoal.plan import Plan
from shoal.world import World
from tests.parallel.shared_memory import shared_peers
from tests.ranks import run_ranks
from tests.train.toy import Record, run_plan

ROOM = 1 << 16  # far less than what is sent


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def drawn(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).bfloat16()


def moved(world: World, folder: Path) -> tuple[bool, bool, list[str]]:
    """Whether gathers and sums by shared memory, done twice, have the bits of those by collectives."""
    notes: list[str] = []
    gathers, exchanges = shared_peers(folder, everyone(), ROOM, notes)
    sizes = (3, 70_000, 1, 9_000, BLOCK)
    gathered, summed = [], []
    for turn in range(2):
        parts = [drawn(world.rank + 10 * turn, size) for size in sizes]
        parts.append(parts[1].view(torch.uint8)[:1001])  # bytes, whose number no type of 16 bits has
        outputs = [[part.new_zeros(part.numel() * world.size) for part in parts] for _ in range(2)]
        places = [[whole.view(world.size, -1)[world.rank] for whole in wholes] for wholes in outputs]
        for mine in places:
            for place, part in zip(mine, parts, strict=True):
                place.copy_(part)
        gathers.gather(outputs[0], places[0])
        exchange.gather_many(outputs[1], places[1], everyone())
        gathered += [torch.equal(a, b) for a, b in zip(*outputs, strict=True)]
        gradients = [drawn(world.rank + 100 + turn, size * world.size) for size in sizes]
        sums = [[torch.zeros(size) for size in sizes] for _ in range(2)]
        squares = [
            exchanges.sum_parts(sums[0], gradients),
            exchange._exchange(sums[1], gradients, everyone()),
        ]
        summed += [torch.equal(a, b) for a, b in zip(*sums, strict=True)]
        torch.testing.assert_close(squares[0], squares[1], rtol=1e-6, atol=0)  # summed in pieces here
    return all(gathered), all(summed), notes


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathers_and_sums_are_those_of_collectives(ranks: int, tmp_path: Path) -> None:
    for gathered, summed, notes in run_ranks(ranks, moved, tmp_path):
        assert gathered
        assert summed
        assert notes[0].startswith("gather by copies bfloat16 (")
        assert notes[1].startswith("exchange by copies bfloat16 (")
        assert len(notes) == 4


def test_parts_fill_the_room_and_cover_everything() -> None:
    lengths = (0, 5, 700, 64, 1)
    pieces = cuts(lengths, 130, 16)
    for piece in pieces:
        ends = [cut.at + cut.length for cut in piece]
        assert max(ends) <= 128
        assert all(cut.at >= end for cut, end in zip(piece[1:], ends[:-1], strict=True))
        assert all(cut.at % 16 == 0 and cut.begin % 16 == 0 for cut in piece)
    for number, length in enumerate(lengths):
        found = [
            i for piece in pieces for cut in piece if cut.tensor == number for i in range(cut.begin, cut.end)
        ]
        assert found == list(range(length))
    assert len(pieces) == -(-sum(-(-length // 16) for length in lengths) // 8)


def trained(world: World, plan: Plan, precision: Precision, folder: Path) -> tuple[Record, Record, int]:
    """By collectives, by shared memory, and the number of gathers and exchanges."""
    notes: list[str] = []

    def find(group: dist.ProcessGroup, world: World, wanted: bool | None) -> Any:
        return shared_peers(folder, group, ROOM, notes)

    usual = run_plan(world, plan, precision, steps=3)
    with patch.object(direct, "find_peers", find):
        return usual, run_plan(world, plan, precision, steps=3), len(notes)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (Plan(shard=2, zero=3, micro_batch=4), "bf16"),
        (Plan(shard=2, zero=2, micro_batch=4), "bf16"),
        (Plan(shard=2, zero=1, micro_batch=4), "fp32"),
        (Plan(shard=4, zero=3, micro_batch=1), "bf16"),  # rows that 4 ranks do not divide
        (Plan(replicate=2, shard=2, zero=2, micro_batch=2), "bf16"),
        (Plan(pipeline=2, shard=2, zero=3, micro_batch=1), "bf16"),
    ],
)
def test_training_has_the_same_bits(plan: Plan, precision: Precision, tmp_path: Path) -> None:
    for usual, shared, calls in run_ranks(plan.world_size, trained, plan, precision, tmp_path):
        assert calls > 0
        assert shared.losses == usual.losses
        assert shared.norms == pytest.approx(usual.norms, rel=1e-6)  # squares are added up in pieces
        for name, weight in usual.weights.items():
            torch.testing.assert_close(shared.weights[name], weight, rtol=1e-6, atol=1e-8)


def refused(world: World) -> list[str]:
    assert find_peers(everyone(), world, None) is None
    assert find_peers(everyone(), world, False) is None
    with pytest.raises(ValueError, match=r"plan.copy_engines: .*; leave it out") as found:
        find_peers(everyone(), world, True)
    return [str(found.value)]


def test_who_asks_for_it_where_it_is_not_is_told_why() -> None:
    assert run_ranks(2, refused) == [["plan.copy_engines: it is for NVIDIA GPUs; leave it out"]] * 2
