"""Machines that cannot hear each other: exactly one side goes on. Each has a network of its own here (root, iproute2)."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.machines import Machine, events_of, steps_of, until
from tests.launch.networks import Networks, can_make_networks, networks
from tests.launch.test_nodes import STEPS, leader_of, numbers, settings

pytestmark = pytest.mark.skipif(not can_make_networks(), reason="needs root and network namespaces")


@pytest.fixture(scope="module")
def there() -> Generator[Networks]:
    with networks(3) as made:
        yield made


def three(there: Networks, folder: Path, nodes: str, **run: Any) -> list[Machine]:
    said = settings(folder, nodes, {"replicate": 3}, interface=None, **run)
    return [Machine(said, namespace=there.namespace(number)) for number in (1, 2, 3)]


def number_of_leader(folder: Path, machines: list[Machine]) -> int:
    leader = leader_of(folder)
    return 1 + next(at for at, one in enumerate(machines) if f"process {one.pid})" in leader)


@pytest.fixture(scope="module")
def undisturbed(there: Networks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    nodes = three(there, folder, "3")
    with nodes[0], nodes[1], nodes[2]:
        assert [one.end() for one in nodes] == ["ok"] * 3, nodes[0].output.read_text()
    return folder


def assert_as(undisturbed: Path, folder: Path) -> None:
    """All steps once, with the same batches, and the same numbers but for sums in another order."""
    assert steps_of(folder) == [*range(1, STEPS + 1)]
    for mine, theirs in zip(numbers(folder)[0], numbers(undisturbed)[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


SLOW = "slow rank=0 step=3 seconds=1; slow rank=0 step=7 seconds=9"


def test_a_machine_that_is_cut_off_is_lost_and_takes_part_again_when_it_is_back(
    undisturbed: Path, there: Networks, tmp_path: Path
) -> None:
    nodes = three(there, tmp_path, "1:3", faults=SLOW)
    with nodes[0], nodes[1], nodes[2]:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        cut = next(n for n in (1, 2, 3) if n != number_of_leader(tmp_path, nodes))
        there.plug(cut, into=False)
        until(lambda: events_of(tmp_path, "fault"), "a loss", 30)
        until(lambda: len(events_of(tmp_path, "start")) == 2, "a smaller world", 30)
        there.plug(cut, into=True)
        assert [one.end() for one in nodes] == ["ok"] * 3, nodes[0].output.read_text()
    assert_as(undisturbed, tmp_path)
    assert "was not heard for 3 s" in events_of(tmp_path, "fault")[0]["message"]
    assert [event["world_size"] for event in events_of(tmp_path, "start")] == [3, 2, 3]


def test_of_two_sides_the_one_with_machines_enough_goes_on(
    undisturbed: Path, there: Networks, tmp_path: Path
) -> None:
    nodes = three(there, tmp_path, "2:3", faults=SLOW)
    with nodes[0], nodes[1], nodes[2]:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        cut = number_of_leader(tmp_path, nodes)
        there.plug(cut, into=False)
        try:
            until(lambda: number_of_leader(tmp_path, nodes) != cut, "another leader", 40)
            others = [one for number, one in enumerate(nodes, start=1) if number != cut]
            assert [one.end() for one in others] == ["ok"] * 2, others[0].output.read_text()
        finally:
            there.plug(cut, into=True)
        assert nodes[cut - 1].end() == "ok"  # and hears that it is over
    assert_as(undisturbed, tmp_path)


def test_a_short_cut_is_no_loss(undisturbed: Path, there: Networks, tmp_path: Path) -> None:
    nodes = three(there, tmp_path, "3", faults="slow rank=0 step=3 seconds=1")
    with nodes[0], nodes[1], nodes[2]:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        there.plug(2, into=False)
        time.sleep(1.0)
        there.plug(2, into=True)
        assert [one.end() for one in nodes] == ["ok"] * 3, nodes[0].output.read_text()
    assert numbers(tmp_path) == numbers(undisturbed)
    assert len(events_of(tmp_path, "epoch")) == 1


def test_a_leader_that_stands_still_finds_that_another_leads_and_follows(
    undisturbed: Path, there: Networks, tmp_path: Path
) -> None:
    nodes = three(there, tmp_path, "2:3", faults=SLOW)
    with nodes[0], nodes[1], nodes[2]:
        until(lambda: len(steps_of(tmp_path)) >= 4, "four steps")
        leader = nodes[number_of_leader(tmp_path, nodes) - 1]
        leader.send(signal.SIGSTOP)
        until(lambda: len(events_of(tmp_path, "start")) >= 2, "a world without it", 40)
        leader.send(signal.SIGCONT)
        assert [one.end() for one in nodes] == ["ok"] * 3, nodes[0].output.read_text()
    assert_as(undisturbed, tmp_path)
