"""A run that fails in one of many ways goes on by itself, and ends with the numbers of a run that nothing disturbed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.config import Settings, parse
from shoal.launch.local import Outcome, launch
from shoal.launch.ready import make_ready
from shoal.observe.status import read_status

STEPS = 6


def settings(folder: Path, faults: str = "", **policy: Any) -> Settings:
    said = parse(
        {
            "model": {
                "dim": 16,
                "layers": 2,
                "heads": 2,
                "kv_heads": 1,
                "ffn": 32,
                "vocab": 300,
                "tied": True,
            },
            "data": {"source": "synthetic", "vocab": 300, "seq_len": 16, "eval_fraction": 0.0},
            "train": {"steps": STEPS, "global_batch": 4} | policy.pop("train", {}),
            "plan": {"micro_batch": 1, "compile": False} | policy.pop("plan", {"shard": 2}),
            "checkpoint": {"memory_every": 1} | policy.pop("checkpoint", {}),
            "run": {"dir": str(folder), "faults": faults, "deadline_s": 20.0} | policy,
        },
        where="test",
    )
    return make_ready(said)


class Ran(NamedTuple):
    outcome: Outcome
    folder: Path

    @property
    def numbers(self) -> list[tuple[Any, ...]]:
        """Of every step: what no failure may change."""
        rows = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [tuple(row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) for row in rows]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def of(self, kind: str, key: str = "step") -> list[Any]:
        return [event[key] for event in self.events if event["event"] == kind]


def ran(folder: Path, faults: str = "", *, device: str = "cpu", **policy: Any) -> Ran:
    found = settings(folder, faults, **policy)
    assert found.plan is not None
    return Ran(launch(found, found.plan.world_size, device=device, quiet=True), folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    from shoal.launch.ranks import Ranks
    from tests.launch.warm import start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "start", start)
        return ran(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.usefixtures("warm_nursery")
@pytest.mark.parametrize(
    "fault",
    [
        "kill rank=1 step=3",
        "kill rank=0 step=3 phase=update",
        "exit rank=1 step=2 phase=reduce",
        "crash rank=0 step=4 phase=data",
        "raise rank=1 step=3 phase=update",
        "parent rank=1 step=3",
    ],
)
def test_a_failed_run_goes_on_with_the_same_numbers_and_redoes_one_step_at_most(
    fault: str, undisturbed: Ran, tmp_path: Path
) -> None:
    found = ran(tmp_path, fault)
    assert found.outcome == Outcome("ok", STEPS)
    assert found.numbers == undisturbed.numbers
    step = int(fault.split("step=")[1].split()[0])
    # a step is redone where the other rank had not copied it yet when it was ended, too
    assert found.of("start") in ([0, step], [0, step - 1])
    assert len(found.of("fault", "message")) == len(found.of("restart")) == 1


@pytest.mark.usefixtures("warm_nursery")
def test_sums_over_three_replicas_have_the_same_bits_after_a_restart(tmp_path: Path) -> None:
    how = {"plan": {"replicate": 3}, "train": {"global_batch": 6}}
    right, found = ran(tmp_path / "right", **how), ran(tmp_path / "found", "kill rank=2 step=3", **how)
    assert found.outcome == Outcome("ok", STEPS)
    assert found.of("start")[1:] in ([2], [3])
    assert found.numbers == right.numbers


@pytest.mark.usefixtures("warm_nursery")
def test_without_copies_in_memory_a_run_goes_on_from_its_last_checkpoint(
    undisturbed: Ran, tmp_path: Path
) -> None:
    found = ran(
        tmp_path, "kill rank=1 step=5; kill rank=0 step=3", checkpoint={"memory_every": 0, "every": 2}
    )
    assert found.outcome == Outcome("ok", STEPS)
    assert found.numbers == undisturbed.numbers
    assert found.of("start") == [0, 2, 4]


@pytest.mark.usefixtures("warm_nursery")
def test_a_hang_is_found_by_its_deadline_and_the_run_goes_on(undisturbed: Ran, tmp_path: Path) -> None:
    found = ran(tmp_path, "stop rank=1 step=3", deadline_s=3.0)
    assert found.outcome == Outcome("ok", STEPS)
    assert found.numbers == undisturbed.numbers
    assert found.of("fault", "rank") == [1]


@pytest.mark.usefixtures("warm_nursery")
def test_an_exception_that_comes_again_ends_the_run_with_its_report(tmp_path: Path) -> None:
    faults = "; ".join(["raise rank=1 step=2"] * 3)
    found = ran(tmp_path, faults)
    assert found.outcome.state == "failed"
    assert found.outcome.report.startswith("rank 1 failed in step 2, phase forward: RuntimeError: a fault of")
    assert found.of("start") == [0, 2]


@pytest.mark.usefixtures("warm_nursery")
def test_no_run_is_started_again_where_that_is_not_wanted(tmp_path: Path) -> None:
    found = ran(tmp_path, "kill rank=1 step=2", restarts=0)
    assert found.outcome.state == "failed"
    assert found.of("restart") == []
    assert found.of("given up", "reason") == ["run.restarts = 0"]


@pytest.mark.usefixtures("warm_nursery")
def test_ranks_that_met_by_a_file_are_not_started_again_since_it_serves_one_meeting(tmp_path: Path) -> None:
    found = ran(tmp_path / "run", "kill rank=1 step=2", init_method=f"file://{tmp_path}/meeting")
    assert found.outcome.state == "failed"
    (reason,) = found.of("given up", "reason")
    assert "serves one meeting of ranks" in reason


@pytest.mark.usefixtures("warm_nursery")
def test_an_orderly_stop_is_no_failure(tmp_path: Path) -> None:
    found = ran(tmp_path, "term rank=1 step=2")
    assert found.outcome.state == "interrupted"
    assert found.of("restart") == []
    again = ran(tmp_path)
    assert again.outcome == Outcome("ok", STEPS)


@pytest.mark.usefixtures("warm_nursery")
def test_memory_and_processes_of_a_run_that_was_started_again_are_gone_with_it(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    found = ran(tmp_path, "kill rank=1 step=2; kill rank=0 step=4")
    assert found.outcome.state == "ok"
    assert set(Path("/proc/self/fd").iterdir()) <= before
    ranks = [read_status(path) for path in (tmp_path / "ranks").glob("*.status")]
    assert len(ranks) == 2
    for status in ranks:
        assert status is not None
        with pytest.raises(ProcessLookupError):
            os.kill(status.pid, 0)


@pytest.mark.usefixtures("warm_nursery")
def test_a_bit_that_flips_in_one_copy_is_found_before_it_is_kept_and_taken_back(tmp_path: Path) -> None:
    plan = {"replicate": 3}
    right = ran(tmp_path / "right", plan=plan, train={"global_batch": 3})
    found = ran(tmp_path / "flipped", "flip rank=1 step=3", plan=plan, train={"global_batch": 3})
    assert found.outcome == Outcome("ok", STEPS)
    assert found.numbers == right.numbers
    assert found.of("fault", "rank") == [1]
    (message,) = found.of("fault", "message")
    assert "after step 4 this rank's copy of " in message
    assert "is not that of ranks [0, 2]" in message
    # those whose copies agree may have kept them before they were ended, and rank 1 then gets theirs
    assert found.of("start") in ([0, 3], [0, 4])


@pytest.mark.usefixtures("warm_nursery")
def test_of_two_copies_that_differ_nobody_is_accused_and_nothing_is_saved(tmp_path: Path) -> None:
    policy = {"plan": {"replicate": 2}, "checkpoint": {"memory_every": 0, "every": 4}}
    found = ran(tmp_path, "flip rank=1 step=3", restarts=0, **policy)
    assert found.outcome.state == "failed"
    assert "on ranks [0, 1], which made the same updates, differ" in found.outcome.report
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.usefixtures("warm_nursery")
def test_replicas_are_compared_every_few_steps_where_that_is_asked_for(tmp_path: Path) -> None:
    policy = {"plan": {"replicate": 2}, "checkpoint": {"memory_every": 0}}
    found = ran(tmp_path, "flip rank=1 step=2", restarts=0, compare_every=2, **policy)
    assert found.outcome.state == "failed"
    assert "after step 4 the copies of " in found.outcome.report
    assert found.outcome.step == 4


@pytest.mark.usefixtures("warm_nursery")
def test_a_collective_too_many_names_its_rank_and_is_not_tried_again(tmp_path: Path) -> None:
    found = ran(tmp_path, "extra rank=1 step=3 phase=reduce")
    assert found.outcome.state == "failed"
    assert found.outcome.report.startswith("rank 1 made another call than others, in call ")
    assert "rank 1 called all_reduce(max) of float32 (3,)" in found.outcome.report
    assert found.of("restart") == []
    assert "ranks made different calls" in found.of("given up", "reason")[0]


@pytest.mark.usefixtures("warm_nursery")
def test_steps_that_are_taken_again_are_told_with_what_would_have_kept_them(tmp_path: Path) -> None:
    def told(name: str, **checkpoint: int) -> list[str]:
        found = ran(tmp_path / name, "kill rank=1 step=4", checkpoint={"memory_every": 0} | checkpoint)
        assert found.outcome == Outcome("ok", STEPS)
        lines = (found.folder / "ranks/0.log").read_text().splitlines()
        assert [line for line in lines if line.startswith("saves ")][-1] == saves[name]
        return [line for line in lines if line.startswith("again ")]

    saves = {
        "none": "saves    at the end alone (checkpoint.every = 0)",
        "some": "saves    every 2 steps and at the end",
        "memory": "saves    at the end alone (checkpoint.every = 0), in memory every 1",
    }
    (whole,) = told("none")
    assert whole.endswith("from the beginning; checkpoint.every, or checkpoint.memory_every, would keep them")
    assert all("would keep" not in line for line in told("some", every=2))
    assert told("memory", memory_every=1) == []


@pytest.mark.usefixtures("warm_nursery")
def test_another_plan_than_before_is_told(tmp_path: Path) -> None:
    ran(tmp_path, train={"steps": 2})
    ran(tmp_path, plan={"replicate": 2})
    lines = (tmp_path / "ranks/0.log").read_text().splitlines()
    assert "         it was shard 2 (ZeRO-3), micro-batch 1" in lines
    assert sum(line.startswith("         it was ") for line in lines) == 1
