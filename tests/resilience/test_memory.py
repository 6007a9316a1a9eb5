"""A rank that is out of memory: all take the step again in smaller micro-batches, with the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.plan import Plan
from shoal.resilience.memory import is_out_of_memory, lighter
from shoal.train.filled import blocks_by_kind, memory_told, what_fills
from tests.resilience.test_goes_on import Ran, ran

PLAN = {"shard": 2, "micro_batch": 4}
TRAIN = {"global_batch": 8, "precision": "fp64"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    from shoal.launch.ranks import Ranks
    from tests.launch.warm import start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "start", start)
        return ran(tmp_path_factory.mktemp("undisturbed"), plan=PLAN, train=TRAIN)


def assert_same_numbers(found: Ran, right: Ran) -> None:
    """Sums over more micro-batches are rounded in another order: units in the last of fp64's 16 digits, grown over 6 steps."""
    for ours, theirs in zip(found.numbers, right.numbers, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.usefixtures("warm_nursery")
@pytest.mark.parametrize(
    ("fault", "checkpoint", "steps"),
    [
        ("memory rank=1 step=3", {"memory_every": 1}, [3]),
        ("memory rank=0 step=0", {"memory_every": 0}, [0]),
        ("memory rank=1 step=3; memory rank=1 step=3", {"memory_every": 0, "every": 2}, [3, 3]),
    ],
    ids=["from memory", "in the first step", "twice, from disk"],
)
def test_all_ranks_take_the_step_again_in_smaller_micro_batches_with_the_same_numbers(
    fault: str, checkpoint: dict[str, int], steps: list[int], undisturbed: Ran, tmp_path: Path
) -> None:
    found = ran(tmp_path, fault, plan=PLAN, train=TRAIN, checkpoint=checkpoint)
    assert found.outcome.state == "ok"
    assert_same_numbers(found, undisturbed)
    sizes = [4, 2, 1][: len(steps) + 1]
    assert found.of("micro-batch halved", "before") == sizes[:-1]
    assert found.of("micro-batch halved", "after") == sizes[1:]
    assert found.of("fault", "rank") == found.of("micro-batch halved", "rank")
    # a rank that was a step behind when it was ended has not copied it
    assert all(
        step in (right, right - 1) for step, right in zip(found.of("micro-batch halved"), steps, strict=True)
    )
    if checkpoint["memory_every"]:  # state of the larger micro-batch is taken up by the smaller
        assert found.of("start")[1] in (2, 3)
    (memory, *_) = found.of("micro-batch halved", "memory")
    assert "this process holds" in memory
    assert re.search(r"of it parameters [\d.]+ MiB, gradients [\d.]+ MiB, optimizer state", memory)
    plan = [event for event in found.events if event["event"] == "start"][-1]["plan"]
    assert f"micro-batch {sizes[-1]}" in plan


@pytest.mark.usefixtures("warm_nursery")
def test_without_a_smaller_micro_batch_nothing_is_started_for_nothing_and_other_plans_are_named(
    tmp_path: Path,
) -> None:
    found = ran(tmp_path, "memory rank=1 step=0", plan={"replicate": 2})
    assert found.outcome.state == "failed"
    assert found.of("restart") == []
    (reason,) = found.of("given up", "reason")
    assert "the micro-batch is one sample" in reason
    assert "plan.recompute=full" in reason
    assert "plan.shard=2 in place of plan.replicate" in reason
    error = json.loads((tmp_path / "ranks/1.error.json").read_text())
    assert error["out_of_memory"]
    assert all(note in found.outcome.report for note in error["notes"])


@pytest.mark.usefixtures("warm_nursery")
def test_a_run_that_is_not_to_be_started_again_keeps_its_plan(tmp_path: Path) -> None:
    found = ran(tmp_path, "memory rank=0 step=2", plan=PLAN, train=TRAIN, restarts=0)
    assert found.outcome.state == "failed"
    assert found.of("micro-batch halved") == []


@pytest.mark.parametrize(
    ("plan", "batch", "phase", "size"),
    [
        (Plan(micro_batch=8), 16, "forward", 4),
        (Plan(), 18, "forward", 9),
        (Plan(micro_batch=9), 18, "eval", 3),  # 4 would not divide
        (Plan(shard=2, micro_batch=1), 18, "forward", None),
        (Plan(micro_batch=8), 16, "update", None),
        (Plan(pipeline=2, schedule="gpipe", micro_batch=4), 16, "forward", None),
        (Plan(pipeline=2, micro_batch=4), 16, "forward", 2),
        (Plan(shard=2, micro_batch=4, shares=(3, 1)), 16, "forward", 2),
        (Plan(shard=2, micro_batch=1, shares=(12, 5)), 17, "forward", None),
        (Plan(shard=2, micro_batch=1, shares=(12, 4)), 16, "forward", 4),  # of 8 each, equally many
    ],
)
def test_the_largest_micro_batch_of_at_most_half_that_divides_is_taken_where_it_helps(
    plan: Plan, batch: int, phase: str, size: int | None
) -> None:
    found = lighter(plan, batch, phase)
    assert (found.plan and found.plan.micro_batch) == size
    assert bool(found.why_not) == (size is None)


def test_only_what_speaks_of_memory_is_taken_for_it() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60)
    assert is_out_of_memory(refused.value)
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_blocks_of_a_gpu_are_told_apart_by_their_address() -> None:
    weight, grad = torch.zeros(4), torch.zeros(4)
    active = {"state": "active_allocated"}
    blocks: list[dict[str, Any]] = [
        active | {"address": weight.untyped_storage().data_ptr(), "size": 512},
        active | {"address": grad.untyped_storage().data_ptr(), "size": 1024},
        active | {"address": 64, "size": 4096},
        {"state": "inactive", "address": 128, "size": 99},
    ]
    segments = [
        {"device": 0, "blocks": blocks},
        {"device": 1, "blocks": [active | {"address": 7, "size": 7}]},
    ]
    kinds, rest = blocks_by_kind({"parameters": [weight, weight[1:]], "gradients": [grad]}, segments, 0)
    assert kinds == {"parameters": 512, "gradients": 1024}
    assert rest == {64: 4096}


def test_on_a_cpu_the_process_and_the_host_are_told() -> None:
    first, second = what_fills({"parameters": [torch.zeros(1 << 20)]}, torch.device("cpu"))
    assert first.startswith("this process holds ")
    assert second == "of it parameters 4.0 MiB; the rest is activations and the program"


def test_copies_of_what_is_being_saved_are_told_by_name() -> None:
    optimizer = SimpleNamespace(held=lambda: {"parameters": [torch.zeros(1 << 20)]})
    step: Any = SimpleNamespace(optimizer=optimizer, shared_bytes=0)
    for copies, told in (([torch.zeros(1 << 19)], ", copies of what is saved 2.0 MiB;"), ([], ";")):
        saves: Any = SimpleNamespace(copies=copies)
        with pytest.raises(MemoryError) as caught, memory_told(step, torch.device("cpu"), saves):
            raise MemoryError
        assert f"of it parameters 4.0 MiB{told}" in caught.value.__notes__[1]
