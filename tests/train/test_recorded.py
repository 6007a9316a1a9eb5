"""Recorded steps: when a step is recorded, what is replayed for it, and, on GPUs, that its bits stay."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import shoal.train.recorded as recorded
import shoal.train.step as step_module
from shoal.data.cut import MicroBatch
from shoal.job import Precision
from shoal.observe.calls import CallFile, Group
from shoal.parallel.apply import parallelize
from shoal.parallel.shard import is_gathered, parameter_groups
from shoal.plan import MOST_RECORDED, Plan
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.recorded import OTHERS, STEPS_BEFORE, Brought, Graph, Pass, Recorded, Work, as_pass
from shoal.train.step import Step
from shoal.world import World, join_world
from tests.ranks import run_ranks
from tests.train.recorded_on_gpus import run
from tests.train.toy import DIMS, OPTIMIZER, STEPS, Record, build, global_batch, part_of, run_plan


class StandIn:
    """A CUDA graph for a CPU: a replay does the work again, and leaves what it gives where the recorded one gave it."""

    def __init__(self, work: Callable[[], Pass], weights: Sequence[nn.Parameter]) -> None:
        self._work, self._weights = work, weights
        self.replays = 0
        assert all(weight.grad is None for weight in weights), "a recording begins without gradients"
        self.found = work()
        self._gradients = [weight.grad for weight in weights]

    def replay(self) -> None:
        self.replays += 1
        for weight in self._weights:
            weight.grad = None
        new = self._work()
        for static, value in zip(self.found[:3], new[:3], strict=True):
            static.copy_(value)
        for static, value in zip(self.found.squares, new.squares, strict=True):
            if static is not None and value is not None:
                static.copy_(value)
        for weight, static in zip(self._weights, self._gradients, strict=True):
            if static is not None and weight.grad is not None:
                static.copy_(weight.grad)

    def reset(self) -> None:
        self.replays = -1


@contextmanager
def on_a_cpu() -> Generator[list[StandIn]]:
    """Steps are recorded on CPUs, too; gives what was recorded."""
    made: list[StandIn] = []
    weights: list[nn.Parameter] = []
    begin = Recorded._record

    def capture(work: Callable[[], Pass]) -> tuple[StandIn, Pass]:
        made.append(StandIn(work, list(weights)))
        return made[-1], made[-1].found

    def record(self: Recorded, brought: Any) -> Graph:
        weights[:] = self._parameters
        return begin(self, brought)

    world = SimpleNamespace(
        size=1, device=torch.device("cuda"), compares_calls=False, calls=None, at_close=lambda _: None
    )

    def recording(step: Step) -> Recorded:
        real, step.world = step.world, cast(World, world)
        try:
            found = ASKED(step)
        finally:
            step.world = real
        assert found is not None
        found._world = real
        return found

    with (
        patch.object(Step, "_recording", recording),
        patch.object(recorded, "capture", capture),
        patch.object(Recorded, "_record", record),
        patch.object(Recorded, "_require_no_draws", lambda self: None),
    ):
        yield made


ASKED = Step._recording


def not_in_a_recording(_: Any) -> None:
    raise AssertionError("a recording cannot wait for what was begun outside of it")


def both(world: World, plan: Plan, precision: Precision) -> tuple[Record, Record, list[int]]:
    launched = run_plan(world, plan, precision)
    with on_a_cpu() as made, patch.object(step_module, "gather_ahead", not_in_a_recording):
        replayed = run_plan(world, plan.model_copy(update={"cuda_graphs": True}), precision, ahead=True)
    return launched, replayed, [graph.replays for graph in made]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=16),
        Plan(micro_batch=4),
        Plan(shard=2, zero=2, micro_batch=8),
        Plan(shard=2, zero=1, micro_batch=4),
        Plan(shard=2, zero=2, micro_batch=2),
        Plan(shard=2, zero=3, micro_batch=2),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replay_is_given_its_own_batch_and_makes_the_steps_gradients(
    plan: Plan, precision: Precision
) -> None:
    for launched, replayed, replays in run_ranks(plan.world_size, both, plan, precision):
        assert replays == [STEPS - STEPS_BEFORE]
        assert replayed.losses == launched.losses
        assert replayed.norms == launched.norms
        assert all(torch.equal(replayed.weights[n], weight) for n, weight in launched.weights.items())


class Told:
    """A step of one weight, and what was asked of it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weight = nn.Parameter(torch.ones(()))
        self.ran: list[int] = []
        self.freed = 0
        self.made: list[StandIn] = []
        self.work = Work(self.run, self.bring, self.compute, tuple, self.free, lambda: None)
        self.recorded = Recorded(self.work, [self.weight], world)
        monkeypatch.setattr(recorded, "capture", self.capture)
        monkeypatch.setattr(Recorded, "_require_no_draws", lambda recorded: None)

    def free(self) -> None:
        self.freed += 1

    def capture(self, work: Callable[[], Pass]) -> tuple[StandIn, Pass]:
        self.made.append(StandIn(work, [self.weight]))
        return self.made[-1], self.made[-1].found

    def run(self, micro_batches: Any) -> Pass:
        self.ran.append(len(micro_batches))
        last = len(micro_batches) - 1
        self.weight.grad = None
        return as_pass([self.compute(b, i == last) for i, b in enumerate(self.bring(micro_batches))], ())

    def bring(self, micro_batches: Any) -> list[Brought]:
        return [Brought(micro.data, float(micro.samples > 0)) for micro in micro_batches]

    def compute(self, brought: Brought, last: bool) -> Tensor:
        (self.weight * brought.data.sum() * brought.counts).backward()
        return torch.tensor([2.0, 1.0, len(brought.data)])

    @property
    def replays(self) -> int:
        graph = self.recorded._graph
        return graph.graph.replays if graph is not None else 0  # pyrefly: ignore[missing-attribute]


def micro(*values: float, samples: int = 1) -> MicroBatch:
    return MicroBatch(torch.tensor(values), 0, samples)


@pytest.fixture
def world() -> Any:
    with join_world(device="cpu") as here:
        yield here


def test_a_step_is_recorded_after_the_first_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(world, monkeypatch)
    for step in range(STEPS_BEFORE + 2):
        batches = [micro(1.0 + step, index) for index in range(5)]
        found = told.recorded(batches)
        assert (found.loss.item(), found.weight.item(), found.losses.tolist()) == (5.0, 10.0, [2.0] * 5)
        assert told.weight.grad is not None
        assert told.weight.grad.item() == 5 * (1 + step) + 10
    assert told.ran == [5] * STEPS_BEFORE
    assert told.replays == 2
    assert told.freed == 2


def test_a_batch_of_another_form_is_launched_and_the_recording_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(world, monkeypatch)
    others = [
        [micro(1.0)],
        [micro(1.0, 2.0), micro(3.0, 4.0)],
        [micro(1.0, 2.0, samples=0)],
    ]
    for _ in range(STEPS_BEFORE + 1):
        told.recorded([micro(1.0, 2.0)])
    for other in others:
        told.recorded(other)
    told.recorded([micro(3.0, 4.0)])
    assert told.ran == [1] * STEPS_BEFORE + [1, 2, 1]
    assert told.replays == 2
    assert told.weight.grad is not None
    assert told.weight.grad.item() == 7


def test_steps_of_many_micro_batches_are_launched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(world, monkeypatch)
    for count in (MOST_RECORDED + 1, MOST_RECORDED):
        for _ in range(STEPS_BEFORE + 2):
            told.recorded([micro(1.0)] * count)
    assert told.ran == [MOST_RECORDED + 1] * (STEPS_BEFORE + 2) + [MOST_RECORDED] * STEPS_BEFORE
    assert told.replays == 2


def test_a_recording_of_what_no_longer_comes_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(world, monkeypatch)
    for _ in range(STEPS_BEFORE + 1):
        told.recorded([micro(1.0)])
    for _ in range(OTHERS - 1):
        told.recorded([micro(1.0, 2.0)])
    told.recorded([micro(1.0)])
    assert told.replays == 2
    for _ in range(OTHERS + STEPS_BEFORE + 1):
        told.recorded([micro(1.0, 2.0)])
    assert [graph.replays for graph in told.made] == [-1, 1]


def test_what_a_replay_gave_stays_when_the_next_one_comes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(world, monkeypatch)
    told.compute = lambda brought, last: torch.stack([brought.data.sum()] * 3)  # pyrefly: ignore
    told.recorded = Recorded(
        told.work._replace(compute=told.compute, run=lambda _: as_pass([torch.zeros(3)], ())), [], world
    )
    found = [told.recorded([micro(float(step))]) for step in range(STEPS_BEFORE + 2)][-2:]
    assert [each.loss.item() for each in found] == [STEPS_BEFORE, STEPS_BEFORE + 1]


class OwnList(list[Tensor]):
    """Which torch takes for one thing."""


@pytest.mark.parametrize("data", [OwnList([torch.ones(1)]), "no tensor", object(), [torch.ones(1), object()]])
def test_data_that_is_not_of_tensors_and_plain_values_is_not_recorded(data: Any) -> None:
    assert recorded._form(MicroBatch(data, 0, 1)) is None
    assert recorded._form(MicroBatch({"a": [torch.ones(1)], "b": "x"}, 0, 1)) is not None


def disagreeing(world: World) -> tuple[list[int], float]:
    """Rank 1 has a batch of another form when rank 0 would record, and when both would replay."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        told = Told(world, monkeypatch)
        ways = []
        for step in range(2 * STEPS_BEFORE + 5):
            odd = world.rank == 1 and step in (STEPS_BEFORE, 2 * STEPS_BEFORE + 2)
            before = told.replays
            told.recorded([micro(1.0, 2.0) if odd else micro(1.0)])
            ways.append(int(told.replays > before))
        assert told.weight.grad is not None
        return ways, told.weight.grad.item()


def test_ranks_record_and_replay_together_or_not_at_all() -> None:
    first, second = run_ranks(2, disagreeing)
    assert first[0] == second[0] == [0] * (2 * STEPS_BEFORE + 1) + [1, 0, 1, 1]


def test_a_recording_ends_before_the_groups_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    with join_world(device="cpu") as here:
        told = Told(here, monkeypatch)
        for _ in range(STEPS_BEFORE + 1):
            told.recorded([micro(1.0)])
        assert told.replays == 1
        at_end: list[int] = []
        with patch("shoal.world.dist.destroy_process_group", lambda: at_end.append(told.replays)):
            here.close()
        assert at_end == [0]
    torch.distributed.destroy_process_group()


def test_collectives_of_a_recording_are_noted_at_each_replay(world: World) -> None:
    file = CallFile(None)
    group = Group("0", "shard", (0, 1))
    with file.kept() as kept:
        file.add(group, "all_gather float32 (4,)", "a.py:1 in f")
    file.add(group, "all_reduce sum float32 (4,)", "b.py:2 in g")
    world.calls = file
    graph: Any = SimpleNamespace(replay=lambda: None)
    owner = Recorded(Work(*[lambda *_: ()] * 6), [], world)  # pyrefly: ignore[bad-argument-type]
    owner._replay(Graph(graph, [], as_pass([torch.zeros(3)], ()), kept))
    assert [call.text.split()[0] for call in file.read().calls] == ["all_reduce", "all_gather"]
    assert [call.number for call in file.read().calls] == [1, 2]


def test_what_cannot_be_recorded_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(world, monkeypatch)

    def fails(_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded, "capture", fails)
    for _ in range(STEPS_BEFORE):
        told.recorded([micro(1.0)])
    with pytest.raises(RuntimeError, match=r"plan\.cuda_graphs.*not permitted.*leave plan\.cuda_graphs out"):
        told.recorded([micro(1.0)])


def test_want_of_memory_is_told_as_such(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(world, monkeypatch)

    def fails(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recorded, "capture", fails)
    for _ in range(STEPS_BEFORE):
        told.recorded([micro(1.0)])
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        told.recorded([micro(1.0)])


@pytest.mark.parametrize("offset", [0, 4])
def test_random_numbers_are_refused(world: World, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    owner = Recorded(Work(*[lambda *_: ()] * 6), [], world)  # pyrefly: ignore[bad-argument-type]
    generator = SimpleNamespace(get_offset=lambda: offset)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    if not offset:
        owner._require_no_draws()
        return
    with pytest.raises(ValueError, match="random numbers of this model"):
        owner._require_no_draws()


def test_a_step_that_is_gone_is_not_held_by_its_world(world: World) -> None:
    owner = Recorded(Work(*[lambda *_: ()] * 6), [], world)  # pyrefly: ignore[bad-argument-type]
    there = weakref.ref(owner)
    del owner
    gc.collect()
    assert there() is None


def test_experts_whose_tokens_the_host_counts_are_refused(world: World) -> None:
    model = nn.Linear(2, 2)
    model.rebalance = lambda skip: None  # pyrefly: ignore
    with pytest.raises(ValueError, match="balance of experts"):
        Step(model, NextToken(), AdamW(lr=1e-3), Plan(cuda_graphs=True), world)


def watched(world: World) -> list[bool]:
    """Whether units are gathered when a step is recorded, and when it is replayed, after a forward between steps."""
    plan = Plan(shard=2, zero=2, micro_batch=8, cuda_graphs=True)
    seen: list[bool] = []
    with on_a_cpu() as made:
        model = parallelize(build, plan, world, precision="fp32", seed=7)
        step = Step(model, NextToken(), OPTIMIZER, plan, world, total_steps=9)
        groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in parameter_groups(m)]
        begin = Recorded._replay

        def replay(self: Recorded, graph: Graph) -> Pass:
            seen.append(any(map(is_gathered, groups)))
            return begin(self, graph)

        with patch.object(Recorded, "_replay", replay):
            for number in range(STEPS_BEFORE + 2):
                step(part_of(global_batch(number), number, plan, world.rank))
                with torch.no_grad():
                    model(global_batch(number)["tokens"])
        assert [graph.replays for graph in made] == [2]
    return seen


def test_what_a_forward_between_steps_gathered_is_given_up() -> None:
    assert run_ranks(2, watched) == [[False, False]] * 2


def test_on_a_cpu_nothing_is_recorded(world: World) -> None:
    record = run_plan(world, Plan(micro_batch=16, cuda_graphs=True), "fp32", steps=STEPS_BEFORE + 2)
    assert record.losses == run_plan(world, Plan(micro_batch=16), "fp32", steps=STEPS_BEFORE + 2).losses


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"pipeline": 2}, "pipeline's stages"),
        ({"shard": 2, "expert": 2}, "tokens of each expert"),
        ({"replicate": 2}, "DistributedDataParallel"),
        ({"offload": ["optimizer"]}, "in host memory"),
        ({"recompute": "full"}, "run again"),
    ],
)
def test_plans_that_cannot_be_recorded_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Plan.model_validate({**keys, "cuda_graphs": True})
    assert not Plan.model_validate({**keys, "cuda_graphs": False}).cuda_graphs


def interrupted(world: World) -> tuple[Any, Any, int]:
    """What GPUs are asked below, by the stand-in."""
    plan = Plan(shard=2, zero=2, micro_batch=4)
    numbers, weights, _ = run(world, plan, "bf16", DIMS)
    with on_a_cpu(), patch.object(torch.cuda, "empty_cache", lambda: None):
        found, recorded_weights, replays = run(
            world, plan.model_copy(update={"cuda_graphs": True}), "bf16", DIMS
        )
    same = all(torch.equal(recorded_weights[name], weight) for name, weight in weights.items())
    return numbers, found if same else None, replays


def test_other_steps_evaluations_and_looks_into_steps_between_replays_change_nothing() -> None:
    for numbers, found, replays in run_ranks(2, interrupted):
        assert found == numbers and replays == 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_recorded_bits_are_those_of_launched_steps_on_gpus(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs")
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={ranks}",
        *("-m", "tests.train.recorded_on_gpus"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
