"""What goes by the memory of other ranks has the bits of what goes by collectives."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal.parallel.direct as direct
import shoal.parallel.exchange as exchange
import shoal.parallel.reach as reach
import shoal.train.step as step_module
from shoal.job import Precision
from shoal.parallel.exchange import Exchange
from shoal.parallel.peers import Peers, cuts
from shoal.parallel.reach import find_peers
from shoal.parallel.sums import BLOCK
from shoal.plan import Plan
from shoal.world import World
from tests.parallel.shared_memory import shared_peers
from tests.ranks import run_ranks
from tests.train.test_recorded import on_a_cpu
from tests.train.toy import DIMS, STEPS, Record, run_plan

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
    peers = shared_peers(folder, everyone(), ROOM, notes)
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
        peers.gather(outputs[0], places[0])
        exchange.gather_many(outputs[1], places[1], everyone())
        gathered += [torch.equal(a, b) for a, b in zip(*outputs, strict=True)]
        gradients = [drawn(world.rank + 100 + turn, size * world.size) for size in sizes]
        sums = [[torch.zeros(size) for size in sizes] for _ in range(2)]
        squares = [
            peers.sum_parts(sums[0], gradients),
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


def trained(world: World, plan: Plan, precision: Precision, folder: Path) -> tuple[Record, Record, list[str]]:
    """By collectives, by shared memory, and what was done there."""
    notes: list[str] = []

    def find(group: dist.ProcessGroup, world: World, wanted: bool | None) -> Peers:
        return shared_peers(folder, group, ROOM, notes)

    dims = DIMS._replace(dim=64, ffn=128) if precision == "float8_gather" else DIMS
    # squares that are found on the way are added up in pieces, and the norm is part of the update
    with patch.object(Exchange, "take_squares", lambda self: None):
        usual = run_plan(world, plan.model_copy(update={"cuda_graphs": None}), precision, dims=dims)
        with patch.object(direct, "find_peers", find), on_a_cpu() if plan.cuda_graphs else nullcontext():
            return usual, run_plan(world, plan, precision, dims=dims, ahead=True), notes


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (Plan(shard=2, zero=3, micro_batch=4), "bf16"),
        (Plan(shard=2, zero=2, micro_batch=4), "bf16"),
        (Plan(shard=2, zero=2, micro_batch=8), "fp16"),
        (Plan(shard=2, zero=2, micro_batch=8, cuda_graphs=True), "bf16"),
        (Plan(shard=2, zero=3, micro_batch=8, cuda_graphs=True), "bf16"),
        (Plan(shard=2, zero=1, micro_batch=4), "fp32"),
        (Plan(shard=2, zero=2, micro_batch=4), "float8_gather"),
        (Plan(shard=2, zero=3, micro_batch=8, cuda_graphs=True), "float8_gather"),
        (Plan(shard=4, zero=3, micro_batch=1), "bf16"),  # rows that 4 ranks do not divide
        (Plan(shard=4, zero=2, micro_batch=4), "bf16"),
        (Plan(replicate=2, shard=2, zero=2, micro_batch=2), "bf16"),
        (Plan(pipeline=2, shard=2, zero=3, micro_batch=1), "bf16"),
        (Plan(pipeline=2, shard=2, zero=1, micro_batch=1), "bf16"),
        (Plan(tensor=2, shard=2, zero=2, micro_batch=4), "bf16"),
    ],
)
def test_training_has_the_same_bits(plan: Plan, precision: Precision, tmp_path: Path) -> None:
    for usual, shared, notes in run_ranks(plan.world_size, trained, plan, precision, tmp_path):
        exchanged = precision != "fp32" and plan.zero_stage != 1
        done = {note.split()[0] for note in notes}
        assert done == {"gather", *(["exchange"] if exchanged else [])} or plan.pipeline > 1
        assert shared.losses == usual.losses
        assert shared.norms == usual.norms
        for name, weight in usual.weights.items():
            assert torch.equal(shared.weights[name], weight), name


def casts(world: World, plan: Plan, folder: Path) -> tuple[int, int]:
    """How many times a unit's weights were cast before a gather, and how many gathers began during an update."""
    fill, ahead, calls, early = direct._fill, direct.gather_ahead, [], []

    def counted(*args: Any) -> None:
        calls.append(1)
        fill(*args)

    def begun(model: nn.Module) -> None:
        early.append(1)
        ahead(model)

    def find(group: dist.ProcessGroup, world: World, wanted: bool | None) -> Peers:
        return shared_peers(folder, group, ROOM, [])

    with (
        patch.object(direct, "find_peers", find),
        patch.object(direct, "_fill", counted),
        patch.object(step_module, "gather_ahead", begun),
        on_a_cpu() if plan.cuda_graphs else nullcontext(),
    ):
        run_plan(world, plan, "bf16", ahead=True)
    return len(calls), len(early)


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        (Plan(shard=2, zero=2, micro_batch=4), 3),
        (
            Plan(shard=2, zero=2, micro_batch=8, cuda_graphs=True),
            3 + 3,
        ),  # what stands for a graph records, and works again
        (Plan(shard=2, zero=3, micro_batch=4), 6 * 2 * (2 + 1 + 2)),
    ],
)
def test_updates_leave_weights_as_they_are_gathered(plan: Plan, most: int, tmp_path: Path) -> None:
    """Where they have their places: two blocks and what is outside are cast once. Elsewhere before each gather."""
    assert run_ranks(2, casts, plan, tmp_path) == [(most, STEPS - 1)] * 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compares_calls": True}, "ranks compare"),
        ({"is_one_host": lambda group: False}, "ranks that cut the model are on several"),
        ({"device": torch.device("cpu")}, "NVIDIA"),
    ],
)
def test_where_it_cannot_be_the_reason_is_told_before_memory_is_asked_for(
    changes: dict[str, Any], why: str
) -> None:
    known = {"device": torch.device("cuda"), "compares_calls": False, "is_one_host": lambda group: True}
    world: Any = SimpleNamespace(**known | changes)
    assert why in reach._why_not(cast(dist.ProcessGroup, None), world)


def refused(world: World) -> list[str]:
    assert find_peers(everyone(), world, None) is None
    assert find_peers(everyone(), world, False) is None
    with pytest.raises(ValueError, match=r"plan.copy_engines: .*; leave it out") as found:
        find_peers(everyone(), world, True)
    return [str(found.value)]


def test_who_asks_for_it_where_it_is_not_is_told_why() -> None:
    assert run_ranks(2, refused) == [["plan.copy_engines: it is for NVIDIA GPUs; leave it out"]] * 2
