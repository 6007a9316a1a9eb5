"""What is gathered and sent without copies is what torch's own `fully_shard` gathers and sends."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import shoal.parallel.apply as apply
import shoal.parallel.direct as direct
import shoal.parallel.exchange as exchange
from shoal.job import Precision
from shoal.parallel.direct import Gather
from shoal.parallel.exchange import Elsewhere, Exchange
from shoal.parallel.shard import parameter_groups
from shoal.parallel.sums import LEAST, blocks_of, cast_into, sum_parts
from shoal.plan import Plan
from shoal.resilience.collectives import FORMS, intercept
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import DIMS, Record, run_plan

DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")),
)


class Found(NamedTuple):
    """What a way of sending gave, and which collectives it called."""

    record: Record
    calls: Counter[str]


def both_ways(world: World, plan: Plan, precision: Precision, one_host: bool) -> tuple[Found, Found]:
    """By `fully_shard`'s copies and without."""
    copied = trained(world, plan, precision, one_host, copies=True)
    return copied, trained(world, plan, precision, one_host, copies=False)


def trained(world: World, plan: Plan, precision: Precision, one_host: bool, *, copies: bool) -> Found:
    calls: Counter[str] = Counter()
    library = torch.library.Library("c10d", "IMPL")
    for name in FORMS:
        intercept(library, name, lambda _, name=name: calls.update([name]))
    with ExitStack() as undo:
        undo.callback(library._destroy)
        if copies:
            undo.enter_context(patch.object(apply, "send_directly", lambda *_: []))
        # their order of additions is another one, and the norm is part of the update
        undo.enter_context(patch.object(Exchange, "take_squares", lambda self: None))
        if not one_host:
            undo.enter_context(patch.object(World, "is_one_host", lambda *_: False))
        return Found(run_plan(world, plan, precision, steps=3), calls)


@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_numbers_are_those_of_fully_shard_to_the_bit(zero: Any, precision: Precision, one_host: bool) -> None:
    """Of two ranks: there is one order in which two numbers can be added."""
    plan = Plan(shard=2, zero=zero, micro_batch=4)
    for copied, sent in run_ranks(2, both_ways, plan, precision, one_host):
        assert sent.record.losses == copied.record.losses
        assert sent.record.norms == copied.record.norms
        for name, weight in copied.record.weights.items():
            assert torch.equal(sent.record.weights[name], weight), name
        assert copied.calls["_allgather_base_"] > 0
        reduces = copied.calls["_reduce_scatter_base_"]
        assert sent.calls["_allgather_base_"] == 0
        exchanged = precision == "bf16" and one_host and zero != 1  # ZeRO-1 adds micro-batches up in fp32
        by_torch = precision == "bf16" and not one_host
        more = sent.calls - copied.calls  # whole weights are gathered by functional collectives, in both
        assert more["allgather_into_tensor_coalesced_"] == copied.calls["_allgather_base_"]
        assert (sent.calls["alltoall_base_"] > 0) == exchanged
        assert sent.calls["_reduce_scatter_base_"] == (reduces if by_torch else 0)
        assert more["reduce_scatter_tensor_coalesced_"] == (0 if exchanged or by_torch else reduces)


@pytest.mark.parametrize(
    "plan", [Plan(shard=4, zero=3, micro_batch=1), Plan(replicate=2, shard=2, zero=2, micro_batch=2)]
)
def test_of_more_ranks_only_the_order_of_sums_differs(plan: Plan) -> None:
    """Rows that 4 ranks do not divide, and copies of a cut model; gradients of 16 bits, several micro-batches."""
    assert DIMS.vocab % 4
    for copied, sent in run_ranks(4, both_ways, plan, "bf16", True):
        assert sent.calls["alltoall_base_"] > 0
        assert sent.record.norms[0] == pytest.approx(copied.record.norms[0], rel=1e-6)  # sums in fp32
        assert sent.record.losses == pytest.approx(
            copied.record.losses, rel=1e-3
        )  # weights rounded to bf16 follow


def test_rows_that_do_not_divide_are_gathered_right() -> None:
    plan = Plan(replicate=1, shard=4, zero=3, micro_batch=1)
    for copied, sent in run_ranks(4, both_ways, plan, "fp64", True):
        for name, weight in copied.record.weights.items():
            torch.testing.assert_close(sent.record.weights[name], weight, rtol=1e-12, atol=1e-14)


def gathered_ahead(world: World) -> tuple[list[int], list[float]]:
    """What a gather ahead that nobody waits for leaves of memory, and whole weights after it and an update."""
    model: Any = apply.parallelize(partial(Short, 8), Plan(shard=2), world)
    (group,) = parameter_groups(model)
    model(torch.ones(1, 8)).sum().backward()
    model.reshard()
    group.unshard()
    held = [storage_bytes(group)]
    group.finalize_backward()
    held.append(storage_bytes(group))
    with torch.no_grad():
        model.weight.to_local().add_(1)
    model.unshard(async_op=True).wait()  # torch's own way
    sums = [float(model.weight.sum())]
    model.reshard()
    model.unshard()
    return held, [*sums, float(model.weight.sum())]


def storage_bytes(group: Any) -> int:
    return sum(t.untyped_storage().nbytes() for p in group.fsdp_params for t in p.all_gather_outputs)


def test_what_was_gathered_ahead_and_is_not_used_is_freed_and_gathered_again() -> None:
    assert run_ranks(2, gathered_ahead) == [([256, 0], [128.0, 128.0])] * 2


def placements(world: World) -> tuple[list[bool], list[bool]]:
    """Of a model's units, whether they are gathered and reduced without copies: a matrix of 2 rows is cut along columns."""
    model = apply.parallelize(partial(Short), Plan(shard=4), world)
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in parameter_groups(module)
    ]
    assert model(torch.ones(1, 8)).tolist() == [[8.0, 8.0]]
    return (
        [isinstance(getattr(group.unshard, "__self__", None), Gather) for group in groups],
        [isinstance(group._reduce_scatter_comm, Exchange) for group in groups],
    )


class Short(nn.Module):
    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_what_is_cut_along_a_later_dim_is_gathered_as_torch_does() -> None:
    assert run_ranks(4, placements) == [([False], [True])] * 4


def hosts(world: World, per_host: int) -> list[bool]:
    world.local_size, world.local_rank = per_host, world.rank % per_host
    pairs: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return [world.is_one_host(pairs[world.rank // 2]), world.is_one_host()]


@pytest.mark.parametrize(
    ("per_host", "expected"), [(4, [True, True]), (2, [True, False]), (1, [False, False])]
)
def test_ranks_of_one_host_are_known(per_host: int, expected: list[bool]) -> None:
    assert run_ranks(4, hosts, per_host) == [expected] * 4


def scattered(world: World) -> bool:
    """Ranks are dealt out to two hosts in turn, which rank 0 cannot see from its own numbers."""
    world.local_size, world.local_rank = 2, world.rank // 2
    return world.is_one_host()


def test_ranks_that_are_not_in_the_order_of_hosts_agree() -> None:
    assert run_ranks(2, scattered) == [False, False]


class Pretended:
    """One rank of a group, of which one kind of exchange is asked: what it sends is kept, what it gets comes from `sent`."""

    def __init__(self, rank: int, sent: list[list[list[Tensor]]]) -> None:
        self._rank, self._sent, self._call = rank, sent, 0

    def size(self) -> int:
        return len(self._sent)

    def rank(self) -> int:
        return self._rank

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], _options: Any) -> None:
        self._sent[self._rank].append([part.clone() for part in inputs])
        for source, output in enumerate(outputs):
            assert output.numel() == (0 if source == self._rank else inputs[(self._rank + 1) % 3].numel())
            if len(self._sent[source]) > self._call:
                output.copy_(self._sent[source][self._call][self._rank])
        self._call += 1


def test_all_gradients_of_a_unit_are_exchanged_by_one_launch() -> None:
    """As on GPUs, for which Gloo cannot stand: three ranks one after another, twice, so that all has been sent."""
    gradients = [[torch.randn(6 * size) for size in (1, 2)] for _ in range(3)]
    for rank in (0, 1, 2):
        sent: list[list[list[Tensor]]] = [[], [], []]
        with patch.object(exchange.distributed_c10d, "_coalescing_manager", lambda *_: nullcontext()):
            for other in (*(other for other in range(3) if other != rank), rank):
                received = [torch.empty(4 * size) for size in (1, 2)]
                exchange._exchange_at_once(received, gradients[other], Pretended(other, sent))  # pyrefly: ignore
        for number, size in enumerate((2, 4)):
            others = [gradients[other][number].view(3, size)[rank] for other in range(3) if other != rank]
            assert torch.equal(received[number], torch.cat(others))


@pytest.mark.parametrize(
    ("backend", "device", "expected"),
    [("nccl", "cuda", True), ("gloo", "cpu", True), ("gloo", "cuda", False), ("mpi", "cpu", False)],
)
def test_backends_that_cannot_gather_or_exchange_many_are_left_to_torch(
    backend: str, device: str, expected: bool
) -> None:
    assert direct._is_known(backend, torch.device(device)) == expected


def test_an_operator_that_is_not_known_is_named() -> None:
    buffer = Elsewhere((4,), torch.float32, torch.device("cpu"), [])
    assert buffer.view(2, -1).shape == (2, 2)
    with pytest.raises(NotImplementedError, match=r"aten\.mul.*older torch"):
        _ = buffer * 2


def test_another_way_to_reduce_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="reduces gradients in a way"):
        another: Any = Exchange(2, list)
        another(torch.ones(2), torch.ones(4), None, dist.ReduceOp.AVG)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [3, LEAST, LEAST + 5])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_sums_are_made_in_the_wider_type(count: int, kind: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = torch.randn(3 * count, generator=generator).to(kind).to(device)
    total, squares = torch.empty(count, device=device), torch.empty(blocks_of(count), device=device)
    sum_parts(parts[:count], parts[count:], total, squares)
    first, second, third = parts.view(3, count).float()
    assert torch.equal(total, first + second + third)
    expected = total.double().square().sum().item()
    assert squares.double().sum().item() == pytest.approx(
        expected, rel=1e-6
    )  # of up to 4,096 numbers in fp32 each


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32])
def test_casts_are_torchs(target: torch.dtype, device: str) -> None:
    source = torch.bfloat16 if target == torch.float32 else torch.float32
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(source).to(device) for size in (3, LEAST + 5, LEAST)]
    found = [torch.empty_like(tensor, dtype=target) for tensor in tensors]
    cast_into(found, tensors)
    for tensor, expected in zip(found, tensors, strict=True):
        assert torch.equal(tensor, expected.to(target))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_bits_are_those_of_fully_shard_on_two_gpus() -> None:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.parallel.on_two_gpus",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
