"""Recorded steps: when a step is recorded, what is replayed for it, and, on GPUs, that its bits stay."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shoal.data.cut import MicroBatch
from shoal.observe.calls import CallFile, Group
from shoal.plan import Plan
from shoal.train.recorded import MOST, STEPS_BEFORE, Brought, Graph, Pass, Recorded, Work, as_pass
from shoal.train.step import Step
from shoal.world import World, join_world
from tests.ranks import run_ranks
from tests.train.toy import Record, run_plan


class StandIn:
    """A CUDA graph for a CPU: a replay does the work, from and into the memory that was recorded."""

    def __init__(self, owner: Recorded, places: list[Brought]) -> None:
        self._owner, self._places = owner, places
        self.found = self._work()
        self.replays = 0

    def _work(self) -> Pass:
        for parameter in self._owner._parameters:
            parameter.grad = None
        work, last = self._owner._work, self._places[-1]
        return as_pass([work.compute(place, place is last) for place in self._places], work.squares())

    def replay(self) -> None:
        self.replays += 1
        for static, new in zip(self.found[:3], self._work()[:3], strict=True):
            static.copy_(new)
        for parameter, static in zip(self._owner._parameters, self._owner._gradients, strict=True):
            assert static is not None and parameter.grad is not None
            static.copy_(parameter.grad)


def stand_in(self: Recorded, places: list[Brought]) -> Graph:
    graph = StandIn(self, places)
    return Graph(graph, places, graph.found, [])  # pyrefly: ignore[bad-argument-type]


def on_a_cpu(step: Step) -> Recorded:
    work = Work(step.forward_backward, step._one_by_one, step._compute, step._squares.found_on_the_way)
    return Recorded(work, step.optimizer.parameters.values(), step.world)


def both(world: World, plan: Plan) -> tuple[Record, Record]:
    launched = run_plan(world, plan, "fp32")
    with (
        patch.object(Step, "_recording", on_a_cpu),
        patch.object(Recorded, "_recorded", stand_in),
        patch.object(Recorded, "_require_no_draws", lambda self: None),
    ):
        return launched, run_plan(world, plan.model_copy(update={"cuda_graphs": True}), "fp32")


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
def test_a_replay_is_given_its_own_batch_and_makes_the_steps_gradients(plan: Plan) -> None:
    for launched, replayed in run_ranks(plan.world_size, both, plan):
        assert replayed.losses == launched.losses
        assert replayed.norms == launched.norms
        assert all(torch.equal(replayed.weights[n], weight) for n, weight in launched.weights.items())


class Told:
    """A step of one weight, and what was asked of it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weight = nn.Parameter(torch.ones(()))
        self.ran: list[int] = []
        self.work = Work(self.run, self.bring, self.compute, tuple)
        self.recorded = Recorded(self.work, [self.weight], world)
        monkeypatch.setattr(Recorded, "_recorded", stand_in)
        monkeypatch.setattr(Recorded, "_require_no_draws", lambda recorded: None)

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
    for count in (MOST + 1, MOST):
        for _ in range(STEPS_BEFORE + 2):
            told.recorded([micro(1.0)] * count)
    assert told.ran == [MOST + 1] * (STEPS_BEFORE + 2) + [MOST] * STEPS_BEFORE
    assert told.replays == 2


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
    owner = Recorded(Work(*[lambda *_: ()] * 4), [], world)  # pyrefly: ignore[bad-argument-type]
    owner._replay(Graph(graph, [], as_pass([torch.zeros(3)], ()), kept))
    assert [call.text.split()[0] for call in file.read().calls] == ["all_gather", "all_reduce", "all_gather"]
    assert [call.number for call in file.read().calls] == [1, 2, 3]


def test_what_cannot_be_recorded_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(world, monkeypatch)

    def fails(*_: Any, **__: Any) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorded, "_recorded", fails)
    for _ in range(STEPS_BEFORE):
        told.recorded([micro(1.0)])
    with pytest.raises(RuntimeError, match=r"plan\.cuda_graphs.*not permitted.*leave plan\.cuda_graphs out"):
        told.recorded([micro(1.0)])


@pytest.mark.parametrize("offset", [0, 4])
def test_random_numbers_are_refused(world: World, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    owner = Recorded(Work(*[lambda *_: ()] * 4), [], world)  # pyrefly: ignore[bad-argument-type]
    generator = SimpleNamespace(get_offset=lambda: offset)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    if not offset:
        owner._require_no_draws()
        return
    with pytest.raises(ValueError, match="random numbers of this model"):
        owner._require_no_draws()


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
