"""In every hang, and for every call that is not the group's, the verdict names rank, call and line; else it is silent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.config import parse
from shoal.launch import watch
from shoal.launch.local import Outcome, launch
from shoal.observe.calls import CallFile, read_all_calls
from shoal.parallel.collectives import all_reduce, all_to_all_rows
from shoal.resilience.collectives import MismatchError, seen
from shoal.world import World
from tests.ranks import run_ranks
from tests.resilience import collectives as targets

STEPS = f"{targets.__name__}:steps"
FOUND_S = 10.0


class Ran(NamedTuple):
    outcome: Outcome
    folder: Path

    @property
    def found_s(self) -> float:
        """From what went wrong to the first word of it."""
        (first, *_) = self.of("alert") + self.of("fault")
        return first["time"] - float((self.folder / targets.WRONG_AT).read_text())

    def of(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["event"] == kind]


def ran(folder: Path, ranks: int = 4, steps: int = 12, deadline_s: float = 60.0, **options: Any) -> Ran:
    how = options.pop("collectives", "note")
    settings = parse(
        {
            "run": {"dir": str(folder), "deadline_s": deadline_s, "collectives": how, "threads": 1},
            "plan": {"replicate": ranks // 2, "shard": 2},
            "train": {"steps": steps, "global_batch": ranks},
            "model": {"options": options},
        },
        where="test",
    )
    return Ran(launch(settings, ranks, device="cpu", target=STEPS, quiet=True), folder)


def line_of(text: str) -> str:
    """Where a target has some text."""
    path = Path(targets.__file__)
    lines = path.read_text().splitlines()
    return f"{path}:{next(number for number, line in enumerate(lines, start=1) if text in line)}"


SUM = "all_reduce(sum) of float32"
OTHERS = {
    "skip": ("all_gather of float32 (3,)", f"{SUM} (8,)"),
    "reduction": (f"{SUM} (8,)", "all_reduce(max) of float32 (8,)"),
    "type": (f"{SUM} (8,)", "all_reduce(sum) of int32 (8,)"),
    "shape": (f"{SUM} (8,)", f"{SUM} (5,)"),
    "operation": (f"{SUM} (8,)", "broadcast(root 0) of float32 (8,)"),
    "order": (f"{SUM} (8,)", f"{SUM} (2,)"),
    "extra": (f"{SUM} (2,)", "all_reduce(sum) of float64 (8,)"),
}


@pytest.mark.usefixtures("warm_nursery")
@pytest.mark.parametrize("how", ["note", "compare"])
@pytest.mark.parametrize("fault", OTHERS)
def test_another_call_ends_the_run_with_both_calls_and_their_lines(
    fault: str, how: str, tmp_path: Path
) -> None:
    found = ran(tmp_path, fault=fault, collectives=how)
    right, wrong = OTHERS[fault]
    first, *lines = found.outcome.report.splitlines()
    assert first.startswith("rank 1 made another call than others, in call ")
    assert first.endswith(" of the shard group (ranks 0, 1):")
    assert lines[0].startswith(f"  rank 0 called {right} at {targets.__file__}:")
    assert lines[1].startswith(f"  rank 1 called {wrong} at {targets.__file__}:")
    assert found.found_s < FOUND_S
    assert [event["rank"] for event in found.of("fault")] == [1]


@pytest.mark.usefixtures("warm_nursery")
def test_a_rank_whose_process_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    found = ran(tmp_path, fault="stop", deadline_s=60.0)
    assert found.found_s < 10  # about 3
    assert found.outcome.report.startswith("rank 1 is stuck for ")
    assert "its process is stopped (SIGSTOP)" in found.outcome.report
    assert (
        "rank 1 did not come to all_gather of float32 (3,), call 19 of the shard group"
        in found.outcome.report
    )


@pytest.mark.usefixtures("warm_nursery")
def test_one_that_goes_on_after_a_second_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STOPPED_S", 8.0)  # for a busy machine
    found = ran(tmp_path, fault="pause", deadline_s=60.0)
    assert found.outcome == Outcome("ok", 12)
    assert found.of("alert") == found.of("fault") == []


@pytest.mark.usefixtures("warm_nursery")
def test_a_rank_that_hangs_is_named_long_before_the_deadline_with_the_call_to_which_it_did_not_come(
    tmp_path: Path,
) -> None:
    found = ran(tmp_path, fault="hang", deadline_s=12.0)
    (alert,) = found.of("alert")
    assert alert["rank"] == 1
    missed = (
        "rank 1 did not come to all_gather of float32 (3,), call 19 of the shard group (ranks 0, 1); rank 0 waits there, "
        f"at {line_of('dist.all_gather(')} in work"
    )
    assert missed in alert["message"]
    assert missed in found.outcome.report
    assert f"at {line_of('time.sleep(1000)')} in work" in found.outcome.report
    assert found.outcome.report.startswith("rank 1 is stuck")
    assert found.found_s < FOUND_S


@pytest.mark.usefixtures("warm_nursery")
def test_a_thousand_healthy_steps_raise_nothing(tmp_path: Path) -> None:
    found = ran(tmp_path, ranks=2, steps=1000, pause=0.0)
    assert found.outcome == Outcome("ok", 1000)
    assert found.of("alert") == found.of("fault") == []
    calls = read_all_calls(tmp_path / "ranks", range(2))
    assert [sum(one.counts.values()) for one in calls.values()] == [4000, 4000]


@pytest.mark.usefixtures("warm_nursery")
def test_a_slow_loader_is_told_of_once_by_rank_and_reason(tmp_path: Path) -> None:
    found = ran(tmp_path, ranks=2, steps=150, fault="slow data")
    assert found.outcome == Outcome("ok", 150)
    (alert,) = found.of("alert")
    assert alert["rank"] == 1
    assert "rank 1 is slow: others wait for it, it waits for its data" in alert["message"]


@pytest.mark.usefixtures("warm_nursery")
def test_nothing_is_noted_where_nobody_wants_it(tmp_path: Path) -> None:
    assert ran(tmp_path, ranks=2, collectives="off").outcome == Outcome("ok", 12)
    assert not list((tmp_path / "ranks").glob("*.calls"))


def every_way(world: World) -> list[str]:
    """Collectives in all the ways that there are, and what was noted of them."""
    file, group = CallFile(None), dist.group.WORLD
    assert group is not None
    x, other = torch.ones(2, 3), 1 - world.rank
    with seen(file, world, compared=True):
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        dist.broadcast(x, src=1)
        dist.reduce(x, dst=0)
        all_reduce(x, group)
        all_to_all_rows(x, [1, 1], [1, 1], group)
        torch.compile(lambda x: all_reduce(x, group, "max"), backend="aot_eager")(x)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(2, 3), other)]
        )
        for work in works:
            work.wait()
        # as torch 2.11's pipelines greet the next rank
        greet = (dist.send, torch.tensor(1.0)) if world.rank == 0 else (dist.recv, torch.zeros(1))
        greet[0](greet[1], other)
        copied = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
        copied(x).sum().backward()
        sharded = torch.nn.Linear(3, 2, bias=False)
        fully_shard(sharded)
        sharded(x).sum().backward()
        dist.barrier()
    dist.all_reduce(x)  # no longer noted
    return [call.text for call in file.read().calls]


def test_collectives_are_noted_however_they_are_called() -> None:
    for rank, texts in enumerate(run_ranks(2, every_way)):
        assert texts[:6] == [
            "all_reduce min float32 (2, 3)",
            "broadcast root 1 float32 (2, 3)",
            "reduce sum root 0 float32 (2, 3)",
            "all_reduce sum float32 (2, 3)",
            "all_to_all float32",
            "all_reduce max float32 (2, 3)",
        ]
        assert set(texts[6:8]) == {"transfer 0 to 1 float32 (2, 3)", "transfer 1 to 0 float32 (2, 3)"}, rank
        assert texts[8] == "transfer 0 to 1 float32 (1,)", rank
        assert "all_reduce sum float32 (6,)" in texts  # DDP's bucket
        assert {"all_gather float32 (3,)", "reduce_scatter avg float32 (3,)"} <= set(texts)  # FSDP
        assert texts[-1] == "barrier"


def another_call(world: World) -> tuple[str, float]:
    with seen(CallFile(None), world, compared=True):
        dist.all_reduce(torch.ones(4))
        began = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(4), op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[world.rank])
        return str(caught.value), time.monotonic() - began


def test_ranks_that_compare_raise_the_same_before_anything_is_sent() -> None:
    (text, _), (same, _) = answers = run_ranks(2, another_call)
    assert text == same
    assert text.startswith(
        "ranks made different calls, in call 2 of the group of ranks 0, 1:\n  rank 0 called "
    )
    assert f"{Path(__file__)}:" in text
    assert "rank 1 called all_reduce(max) of float32 (4,)" in text
    assert max(seconds for _, seconds in answers) < 1.0
