"""The records of a pipeline's ranks that are played are those of ranks that are simulated whole, event by event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.cluster import Cluster
from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.llama import Block, Llama
from shoal.models.moe import Moe
from shoal.plan import Plan
from shoal.planner import pipelines
from shoal.planner.cost import costs_of
from shoal.planner.launch import Launch
from shoal.planner.pipelines import KEPT, simulate_stages
from shoal.planner.repeat import extend
from shoal.planner.replay import replay
from shoal.planner.simulate import Work, boundary_of, simulate
from shoal.planner.trace import Trace
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from tests.planner.real import DIMS, LENGTH, MOE
from tests.planner.test_extend import facts

MICRO_BATCHES = 4  # the first, the second, one that is played from it, and the last


def blocks(layers: int = 2) -> nn.Module:
    return Llama(DIMS._replace(layers=layers, vocab=64))


def experts() -> nn.Module:
    return Moe(MOE._replace(base=DIMS._replace(vocab=64, ffn=0)))


def work(build: Callable[[], nn.Module] = blocks, micro_batches: int = MICRO_BATCHES) -> Work:
    """A job of so many micro-batches of one sample."""

    def batch(plan: Plan, rank: int, step: int) -> StepBatch:
        data = {name: torch.zeros(1, LENGTH, dtype=torch.long) for name in ("tokens", "labels")}
        return StepBatch(step, tuple(MicroBatch(data, number, 1) for number in range(micro_batches)))

    return Work(build, lambda _: NextToken(), AdamW(lr=1e-3), "bf16", batch)


def played(job: Work, plan: Plan, micro_batches: int = MICRO_BATCHES) -> dict[int, Trace]:
    cluster = Cluster.parse(f"{plan.world_size} h100")
    boundary = boundary_of(job, plan, cluster, 0)
    return simulate_stages(job, plan, cluster, boundary, micro_batches=micro_batches)


def whole(job: Work, plan: Plan) -> dict[int, Trace]:
    cluster = Cluster.parse(f"{plan.world_size} h100")
    each = plan.world_size // plan.pipeline
    return {rank: simulate(job, plan, cluster, rank) for rank in range(0, plan.world_size, each)}


def told(trace: Trace) -> list[tuple[Any, ...]]:
    """All that is known of each event; storages are numbered alike in equal records, and launches by their place."""
    place = {event: index for index, event in enumerate(trace.events) if isinstance(event, Launch)}
    found: list[tuple[Any, ...]] = []
    for event, moment in zip(trace.events, trace.moments, strict=True):
        if isinstance(event, Launch):
            on = place.get(event.on) if event.on is not None else None
            said = event.kind, event.operator, event.name, event.nbytes, event.flops, event.dims, event.ranks
            found.append((moment, *said, event.compiled, event.follows, on))
        else:
            storage = trace.storages[event if event >= 0 else ~event]
            said = storage.nbytes, storage.stream, storage.operator, storage.kind, storage.name
            found.append((moment, event, *said, storage.travels))
    return found


class Counted:
    """How many ranks were recorded, and how many played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded, self.played = 0, 0
        recorded, played = pipelines.recorded, pipelines.played

        def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                found = function(*args, **kwargs)
                setattr(self, name, getattr(self, name) + 1)
                return found

            return run

        monkeypatch.setattr(pipelines, "recorded", counting("recorded", recorded))
        monkeypatch.setattr(pipelines, "played", counting("played", played))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.mark.parametrize(
    ("build", "keys"),
    [
        (partial(blocks, 4), {"pipeline": 4, "shard": 2, "compile": True}),
        (blocks, {"pipeline": 2, "schedule": "gpipe", "tensor": 2, "recompute": "full"}),
        (partial(blocks, 4), {"pipeline": 2, "schedule": "interleaved_1f1b", "offload": ("activations",)}),
        (experts, {"pipeline": 2, "shard": 2, "expert": 2}),
    ],
    ids=["1f1b", "gpipe", "interleaved", "experts"],
)
def test_played_ranks_and_micro_batches_are_as_if_they_had_been_simulated(
    build: Callable[[], nn.Module], keys: dict[str, Any], counted: Counted
) -> None:
    plan = Plan.model_validate({"compile": False, **keys})
    job = work(build)
    found, expected = played(job, plan), whole(job, plan)
    assert list(found) == list(expected)
    for rank, trace in expected.items():
        assert told(found[rank]) == told(trace), f"rank {rank}"
    # of four places the first and the last are of their own, of two both are
    assert (counted.recorded, counted.played) == ((3, 1) if plan.pipeline == 4 else (2, 0))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11's records do not repeat: all blocks are simulated"
)
def test_stages_of_many_blocks_are_those_of_few_with_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, count = Plan(pipeline=2, shard=2, compile=True), 8
    job = work(partial(blocks, 19), count)
    extended: list[tuple[int, int]] = []
    monkeypatch.setattr(pipelines, "extend", partial(noted, extended))
    short = played(job, plan, count)
    assert extended == [(KEPT, 10), (KEPT, 9)]  # the head counts as a block
    monkeypatch.setattr(pipelines, "_short", lambda *_: None)
    whole, cluster = played(job, plan, count), Cluster.parse(f"{plan.world_size} h100")
    found, expected = (replay(each, costs_of(cluster), count) for each in (short, whole))
    assert [facts(short[rank], plan) for rank in whole] == [facts(trace, plan) for trace in whole.values()]
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)
    assert found.per_micro_batch_s == pytest.approx(expected.per_micro_batch_s, rel=1e-6)


def noted(extended: list[tuple[int, int]], trace: Trace, kept: int, total: int, **firsts: int) -> Trace:
    made = extend(trace, kept, total, **firsts)
    extended.append((kept, total))
    return made


def test_micro_batches_that_are_left_out_have_their_memory() -> None:
    plan, build = Plan(pipeline=2, compile=False), blocks
    some, all_of_them = played(work(build), plan, 16), played(work(build, 16), plan, 16)
    without = played(work(build), plan)
    for rank, trace in all_of_them.items():
        missing = peak(trace) - peak(without[rank])
        assert missing > 4 * LENGTH * DIMS.dim  # they take something
        assert abs(peak(some[rank]) - peak(trace)) <= 0.15 * missing  # the samples themselves are not there


def peak(trace: Trace) -> int:
    held = most = 0
    for _, event in trace.memory():
        held += trace.storages[event].nbytes if event >= 0 else -trace.storages[~event].nbytes
        most = max(most, held)
    return most


class Keeping(Block):
    """A block that has what each micro-batch gave to it until the next one comes."""

    before: Tensor | None = None

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        out = super().forward(x, rotary, mask)
        self.before = out.detach() * 2
        return out


def keeping(every: type[nn.Module]) -> nn.Module:
    model = Llama(DIMS._replace(vocab=64))
    for block in model.blocks:
        block.__class__ = every
    return model


def test_what_a_micro_batch_leaves_to_the_next_is_simulated(counted: Counted) -> None:
    job, plan = work(partial(keeping, Keeping)), Plan(pipeline=2, compile=False)
    found, expected = played(job, plan), whole(job, plan)
    assert all(told(found[rank]) == told(trace) for rank, trace in expected.items())
    assert (counted.recorded, counted.played) == (0, 0)
    more = played(job, plan, MICRO_BATCHES + 8)  # what is received is there all the same
    received = 8 * LENGTH * DIMS.dim * 2
    assert peak(more[1]) - peak(found[1]) in (received, 2 * received)  # torch 2.11 has it twice


class Growing(Block):
    """A block that computes more for each micro-batch than for the one before."""

    count = 0

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.count += 1
        for _ in range(self.count):
            x = x * 1.0
        return super().forward(x, rotary, mask)


def test_micro_batches_that_are_not_alike_are_simulated(counted: Counted) -> None:
    job, plan = work(partial(keeping, Growing)), Plan(pipeline=2, compile=False)
    found, expected = played(job, plan), whole(job, plan)
    assert all(told(found[rank]) == told(trace) for rank, trace in expected.items())
    assert (counted.recorded, counted.played) == (0, 0)


def partly_frozen() -> nn.Module:
    model = blocks(4)
    model.get_submodule("blocks.1.feed_forward").requires_grad_(False)
    return model


def test_a_rank_whose_blocks_are_trained_is_not_played_from_one_whose_blocks_are_frozen(
    counted: Counted,
) -> None:
    plan, job = Plan(pipeline=4, compile=False), work(partly_frozen)
    found, cluster = played(job, plan), Cluster.parse("4 h100")
    assert told(found[2]) == told(simulate(job, plan, cluster, 2))
    assert (counted.recorded, counted.played) == (4, 0)


def test_one_more_micro_batch_of_a_stage_of_one_block_takes_as_long_as_in_a_longer_step() -> None:
    plan, cluster = Plan(pipeline=2, compile=False), Cluster.parse("2 h100")
    short, long = (replay(played(work(micro_batches=n), plan, n), costs_of(cluster), n) for n in (8, 16))
    assert short.seconds + 8 * short.per_micro_batch_s == pytest.approx(long.seconds, rel=0.05)


def test_parameters_that_are_gathered_by_and_by_are_simulated(counted: Counted) -> None:
    plan, job = Plan(pipeline=2, shard=2, zero=3, compile=False), work()
    found, expected = played(job, plan), whole(job, plan)
    assert all(told(found[rank]) == told(trace) for rank, trace in expected.items())
    assert counted.recorded == 0
