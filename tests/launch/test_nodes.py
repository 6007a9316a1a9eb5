"""A run on several machines, which are processes here: it ends with the numbers of an undisturbed one, whoever goes or comes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from shoal.checkpoint.check import one
from shoal.checkpoint.plain import whole_tensors
from shoal.config import Settings, parse
from shoal.launch.nodes.channel import Channel
from shoal.launch.nodes.fleet import Fleet, Member
from shoal.launch.nodes.member import Here, Served
from shoal.launch.ranks import Ranks
from shoal.launch.watch import Requests
from shoal.observe.health import HealthWatch
from shoal.resilience.faults import STRUCK
from shoal.run import Run, read_json_lines
from tests.launch.machines import Machine, children_of, events_of, steps_of, until

STEPS = 12
JOB: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "dim": 32, "heads": 2, "ffn": 64},
    "data": {"source": "synthetic", "vocab": 260, "seq_len": 16},
    "train": {"steps": STEPS, "global_batch": 12},
    "plan": {"compile": False},
    "checkpoint": {"memory_every": 1, "every": 7},
}


def settings(folder: Path, nodes: str, plan: dict[str, int], **run: Any) -> Settings:
    about = {
        "dir": str(folder),
        "nodes": nodes,
        "interface": "lo",
        "node_deadline_s": 3.0,
        "nodes_wait_s": 30.0,
    }
    return parse(JOB | {"plan": JOB["plan"] | plan, "run": about | run}, "test")


def numbers(folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, bytes]]:
    """Losses and the rest of all steps, and the last checkpoint."""
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if "loss" in row]
    saved = whole_tensors(one(folder / "checkpoints" / f"step-{STEPS:08d}"))
    steps = [tuple(row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) for row in rows]
    return steps, {name: tensor.numpy().tobytes() for name, tensor in saved}


def ended(*machines: Machine) -> list[str | None]:
    return [machine.end() for machine in machines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with (
        Machine(settings(folder, "2", {"replicate": 2})) as one,
        Machine(settings(folder, "2", {"replicate": 2})) as two,
    ):
        assert ended(one, two) == ["ok", "ok"], one.output.read_text() + two.output.read_text()
    return folder


def test_machines_find_each_other_and_train_together(undisturbed: Path) -> None:
    assert steps_of(undisturbed) == [*range(1, STEPS + 1)]
    epochs = events_of(undisturbed, "epoch")
    assert len(epochs) == 1 and epochs[0]["plan"] == "replicate 2"
    *handed_over, last = events_of(undisturbed, "save")
    assert handed_over and all(save["stall_s"] < save["seconds"] for save in handed_over)
    assert last["step"] == STEPS and last["stall_s"] == last["seconds"]  # who ends waits


def same(folder: Path, other: Path) -> bool:
    return numbers(folder) == numbers(other)


def test_a_lost_machine_is_replaced_by_one_that_waits_and_no_bit_is_another(
    undisturbed: Path, tmp_path: Path
) -> None:
    said = settings(tmp_path, "2", {"replicate": 2}, faults="node rank=1 step=5")
    with Machine(said) as one, Machine(said) as two, Machine(said) as spare:
        states = ended(one, two, spare)
        assert sorted(states, key=str) == [None, "ok", "ok"], one.output.read_text()
    assert same(tmp_path, undisturbed)
    fault, begun = events_of(tmp_path, "fault")[0], events_of(tmp_path, "start")[1]
    assert fault["rank"] == 1 and "is gone, with rank 1" in fault["message"]
    assert begun["step"] == 5  # from the memory of the machine that is left


def test_without_another_one_the_rest_goes_on_with_the_same_batches(
    undisturbed: Path, tmp_path: Path
) -> None:
    said = settings(tmp_path, "1:2", {"replicate": 2}, faults="node rank=1 step=5")
    with Machine(said) as one, Machine(said) as two:
        assert sorted(ended(one, two), key=str) == [None, "ok"], one.output.read_text()
    assert steps_of(tmp_path) == [*range(1, STEPS + 1)]
    for mine, theirs in zip(numbers(tmp_path)[0], numbers(undisturbed)[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    again = events_of(tmp_path, "start")[1]
    assert again.pop("load_s") > 0
    assert again | {"time": 0} == {
        "time": 0,
        "event": "start",
        "step": 5,
        "world_size": 1,
        "plan": "one device",
    }


def test_when_who_leads_is_lost_another_machine_leads(undisturbed: Path, tmp_path: Path) -> None:
    said = settings(tmp_path, "2", {"replicate": 2}, faults="")
    with Machine(said) as one, Machine(said) as two, Machine(said) as three:
        machines = [one, two, three]
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        leader = next(machine for machine in machines if f"process {machine.pid}" in leader_of(tmp_path))
        below = children_of(leader.pid)
        leader.send(signal.SIGKILL)
        others = [machine for machine in machines if machine is not leader]
        assert ended(*others) == ["ok", "ok"], others[0].output.read_text()
        assert not any(Path(f"/proc/{pid}").exists() for pid in below)
    assert same(tmp_path, undisturbed)
    assert len(events_of(tmp_path, "epoch")) == 2


def test_a_machine_that_only_waited_leads_and_tells_which_ranks_were_lost(tmp_path: Path) -> None:
    said = settings(tmp_path, "1", {"replicate": 1}, faults="slow rank=0 step=6 seconds=60")
    with Machine(said) as one:
        until((tmp_path / "ranks" / STRUCK).exists, "a slow step, which the run waits for meanwhile")
        with Machine(said) as spare:
            until(lambda: len(events_of(tmp_path, "node came")) == 2, "a second machine")
            one.send(signal.SIGKILL)
            assert ended(one, spare) == [None, "ok"], spare.output.read_text()
    message = events_of(tmp_path, "fault")[0]["message"]
    assert f"(process {one.pid}) is gone, with rank 0: it led" in message


def leader_of(folder: Path) -> str:
    return sorted((folder / "epochs").glob("*.json"))[-1].read_text()


def test_a_machine_that_comes_late_takes_part(undisturbed: Path, tmp_path: Path) -> None:
    said = settings(tmp_path, "1:2", {"replicate": 2}, faults="slow rank=0 step=6 seconds=6")
    with Machine(said) as one:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        with Machine(said) as two:
            assert ended(one, two) == ["ok", "ok"], one.output.read_text()
    assert steps_of(tmp_path) == [*range(1, STEPS + 1)]
    assert [event["world_size"] for event in events_of(tmp_path, "start")] == [1, 2]
    for mine, theirs in zip(numbers(tmp_path)[0], numbers(undisturbed)[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_machine_that_comes_and_leaves_stops_the_others_twice_and_not_again(tmp_path: Path) -> None:
    slow = "slow rank=0 step=3 seconds=3; slow rank=0 step=7 seconds=4"
    said = settings(tmp_path, "1:2", {"replicate": 2}, faults=slow)
    with Machine(said) as one:
        until(lambda: len(steps_of(tmp_path)) >= 3, "three steps")
        with Machine(said) as two:
            until(lambda: len(events_of(tmp_path, "start")) == 2, "a larger world")
            until(lambda: len(steps_of(tmp_path)) >= 6, "six steps")
            two.send(signal.SIGTERM)
            assert two.end() == "interrupted"
        assert one.end() == "ok", one.output.read_text()
    assert steps_of(tmp_path) == [*range(1, STEPS + 1)]
    assert [event["world_size"] for event in events_of(tmp_path, "start")] == [1, 2, 1]


def test_without_restarts_a_lost_leader_ends_the_run_too(tmp_path: Path) -> None:
    said = settings(tmp_path, "1:2", {"replicate": 2}, restarts=0, faults="slow rank=0 step=3 seconds=4")
    with Machine(said) as one, Machine(said) as two:
        until(lambda: len(steps_of(tmp_path)) >= 2, "two steps")
        leader, other = (one, two) if f"process {one.pid})" in leader_of(tmp_path) else (two, one)
        leader.send(signal.SIGKILL)
        assert other.end() == "failed"
    assert [event["reason"] for event in events_of(tmp_path, "given up")] == ["run.restarts = 0"]


def test_signals_to_several_machines_are_one_request(tmp_path: Path) -> None:
    fleet = Fleet(silence_s=3.0)
    for name in ("a", "b"):
        fleet.heard(Member(cast(Channel, None), name, "", 1), {"asks": 1})
    assert fleet.requests.count == 1


def test_a_machine_with_a_gpu_that_went_bad_wants_to_leave_when_its_ranks_are_stopped(tmp_path: Path) -> None:
    class Health:
        first_rank = 0

        def leaving(self) -> list[str]:
            return ["GPU 0 has fallen off the bus"]

    class Ears:
        said: ClassVar[list[dict[str, Any]]] = []

        def send(self, message: dict[str, Any]) -> None:
            self.said.append(message)

    class NoRanks:
        def wait_until_all_ended(self, seconds: float) -> bool:
            return True

    here = Here(Run(tmp_path), "a", "", "lo", 1, "cuda", (), (), Requests(), cast(HealthWatch, Health()))
    here.ranks, here._served = cast(Ranks, NoRanks()), cast(Served, object())
    here._do({"stop": 4}, cast(Channel, Ears()))
    assert Ears.said[0] | {"time": 0, "monotonic": 0} == {
        "stopped": 4,
        "leaving": "GPU 0 has fallen off the bus",
        "time": 0,
        "monotonic": 0,
    }
    here._do({"stop": 5}, cast(Channel, Ears()))  # it had none: nothing is said of GPUs
    assert "leaving" not in Ears.said[1]


def test_a_machine_that_is_asked_to_leave_does_so_between_steps(undisturbed: Path, tmp_path: Path) -> None:
    said = settings(
        tmp_path, "1:2", {"shard": 2}, faults="slow rank=0 step=6 seconds=3; slow rank=0 step=3 seconds=1"
    )
    with Machine(said) as one, Machine(said) as two:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        two.send(signal.SIGTERM)
        assert two.end() == "interrupted"
        assert one.end() == "ok", one.output.read_text()
    assert steps_of(tmp_path) == [*range(1, STEPS + 1)]
    assert [event["reason"] for event in events_of(tmp_path, "node left")] == ["SIGTERM"]
    assert not events_of(tmp_path, "fault")


def test_who_leads_can_leave_too(tmp_path: Path) -> None:
    said = settings(
        tmp_path, "1:2", {"shard": 2}, faults="slow rank=0 step=6 seconds=3; slow rank=0 step=3 seconds=1"
    )
    with Machine(said) as one, Machine(said) as two:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        leader, other = (one, two) if f"process {one.pid}" in leader_of(tmp_path) else (two, one)
        leader.send(signal.SIGTERM)
        assert leader.end() == "interrupted"
        assert other.end() == "ok", other.output.read_text()
    assert steps_of(tmp_path) == [*range(1, STEPS + 1)]


def test_an_interrupt_of_any_machine_ends_the_run_everywhere_and_it_goes_on_later(
    undisturbed: Path, tmp_path: Path
) -> None:
    said = settings(
        tmp_path, "2", {"replicate": 2}, faults="slow rank=0 step=6 seconds=2; slow rank=0 step=3 seconds=1"
    )
    with Machine(said) as one, Machine(said) as two:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        two.send(signal.SIGINT)
        assert ended(one, two) == ["interrupted", "interrupted"], one.output.read_text()
    said = settings(tmp_path, "2", {"replicate": 2})
    with Machine(said) as one, Machine(said) as two:
        assert ended(one, two) == ["ok", "ok"], one.output.read_text()
    assert same(tmp_path, undisturbed)


def test_a_rank_that_fails_is_started_again_on_its_machine(undisturbed: Path, tmp_path: Path) -> None:
    said = settings(tmp_path, "2", {"replicate": 2}, faults="kill rank=1 step=4; raise rank=0 step=8")
    with Machine(said) as one, Machine(said) as two:
        assert ended(one, two) == ["ok", "ok"], one.output.read_text()
    assert same(tmp_path, undisturbed)
    assert [event["message"].split(" in step")[0] for event in events_of(tmp_path, "fault")] == [
        "rank 1 was killed by SIGKILL",
        "rank 0 failed",
    ]


def test_a_process_that_is_stopped_is_found_on_any_machine(undisturbed: Path, tmp_path: Path) -> None:
    said = settings(tmp_path, "2", {"replicate": 2}, faults="stop rank=1 step=5")  # of who does not lead
    with Machine(said) as one, Machine(said) as two:
        assert ended(one, two) == ["ok", "ok"]
    (fault,) = events_of(tmp_path, "fault")
    # long before the deadline: a process that is stopped is not waited for
    assert re.match(r"rank 1 is stuck for [2-9] s in step 5", fault["message"]), fault
    assert same(tmp_path, undisturbed)


def test_a_machine_that_stood_still_is_named_by_all_and_not_who_lost_it(
    undisturbed: Path, tmp_path: Path
) -> None:
    nodes = [
        Machine(settings(tmp_path, "2", {"replicate": 2}, faults="slow rank=0 step=3")) for _ in range(2)
    ]
    with nodes[0], nodes[1]:
        until(lambda: len(steps_of(tmp_path)) >= 3, "three steps")
        still = next(one for one in nodes if f"process {one.pid})" not in leader_of(tmp_path))
        still.send(signal.SIGSTOP)
        until(lambda: events_of(tmp_path, "fault"), "a loss")
        still.send(signal.SIGCONT)
        assert ended(*nodes) == ["ok", "ok"], nodes[0].output.read_text()
    assert numbers(tmp_path) == numbers(undisturbed)
    told = [event["message"] for event in events_of(tmp_path, "fault")]
    assert told and all(f"(process {still.pid}) is gone, with rank" in text for text in told), told


def test_another_job_is_refused_and_the_keys_are_named(tmp_path: Path) -> None:
    first, other = (
        settings(tmp_path, "2", {"replicate": 2}),
        settings(tmp_path, "2", {"replicate": 2}, log_every=7),
    )
    with Machine(first) as one:
        until(lambda: list((tmp_path / "epochs").glob("*.json")), "a leader")
        with Machine(other) as two, Machine(first) as three:
            said = two.end()
            assert said is not None and "run.log_every = 7 against 1" in said
            assert ended(one, three) == ["ok", "ok"]


def test_a_lost_shard_is_had_from_the_memory_of_the_next_machine(tmp_path: Path) -> None:
    right, found = tmp_path / "right", tmp_path / "found"
    for folder, faults in ((right, ""), (found, "node rank=1 step=5")):
        said = settings(folder, "2", {"shard": 2}, faults=faults)
        with Machine(said) as one, Machine(said) as two, Machine(said) as spare:
            assert {None, "ok"} >= set(ended(one, two, spare)), one.output.read_text()
    assert same(found, right)
    assert events_of(found, "start")[1]["step"] in (
        4,
        5,
    )  # and not from the beginning: there is no checkpoint
