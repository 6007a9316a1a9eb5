"""Saves that several machines write together: the files that one would have written, or none and the reason."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shoal.checkpoint.folder import list_checkpoints, start
from shoal.checkpoint.layout import Origin, Piece
from shoal.checkpoint.parts import write_parts
from shoal.resilience.epochs import Epoch, claim, folder_of
from shoal.resilience.handover import HandOver
from shoal.resilience.saver import Saver, Ways
from shoal.resilience.shares import Share, collect, leave_part, open_for_others, refuse_open, wait_until_open
from shoal.run import Run
from shoal.world import World
from tests.checkpoint.test_reshard import Case
from tests.ranks import run_all, run_ranks
from tests.resilience.test_saver import contents, events, save_both, saver_of

FIRSTS = (0, 2)
HEAD, OTHER = Share(0, 2, 3, FIRSTS, 1), Share(2, 1, 3, FIRSTS, 1)


@contextmanager
def two_machines(
    folder: Path, shares: tuple[Share, Share], deadline_s: float = 30.0
) -> Generator[list[Saver]]:
    with ExitStack() as stack:
        yield [stack.enter_context(saver_of(folder, share.ranks, deadline_s)) for share in shares]


def ways_of_both(savers: list[Saver], shares: tuple[Share, Share]) -> tuple[Ways, ...]:
    return tuple(way for made, share in zip(savers, shares, strict=True) for way in made.share(share))


CASES = [Case("dense", "zero 3"), Case("dense", "replicate 2")]


def test_machines_write_the_files_that_one_would_have_written(tmp_path: Path) -> None:
    shares = Share(0, 1, 2, (0, 1), 1), Share(1, 1, 2, (0, 1), 1)
    with ExitStack() as stack:
        arguments = {}
        for case in CASES:
            folder = tmp_path / case.name
            savers = stack.enter_context(two_machines(folder, shares))
            arguments[case.name] = (case, ways_of_both(savers, shares), folder / "by the ranks")
        outcomes = run_all(2, save_both, arguments)
        for case, _, folder in arguments.values():
            outcomes[case.name].get()
            by_ranks, by_machines = contents(folder), contents(folder.parent / "checkpoints")
            assert len(by_ranks) == 2 and by_ranks == by_machines
            (found, *_) = list_checkpoints(folder.parent / "checkpoints")[0]
            names = {path.name for path in found.path.iterdir()}
            assert not {name for name in names if name == "open" or name.startswith("part-")}
            assert len(events(folder.parent, "save")) == 2  # told by one machine


def hand_over(world: World, ways: tuple[Ways, ...], ranks: int = 3) -> None:
    """One save, of one tensor a rank; ranks from `ranks` on end before it is handed over."""
    made = HandOver(ways[world.rank], world)
    state = {f"buffer.{rank}": torch.full((1000,), float(rank)) for rank in range(world.size)}
    if world.rank < ranks:
        assert made.take(5, state, {"job": {}}, time.monotonic(), keep=2)
        made.wait()
    else:
        made._made(state)


def save_once(folder: Path, ranks: int = 3, deadline_s: float = 30.0) -> str:
    """By 2 ranks on one machine and 1 on another; returns why it failed."""
    with two_machines(folder, (HEAD, OTHER), deadline_s) as savers:
        run_ranks(3, hand_over, ways_of_both(savers, (HEAD, OTHER)), ranks)
    failed = events(folder, "save failed")
    assert len(failed) <= 1
    return failed[0]["reason"] if failed else ""


def test_machines_with_different_numbers_of_ranks_save_together(tmp_path: Path) -> None:
    assert save_once(tmp_path) == ""
    ((found,), refused) = list_checkpoints(tmp_path / "checkpoints")
    assert found.step == 5 and not refused
    assert found.manifest["ranks"] == 3
    files = [f"rank-0000{rank}.bin" for rank in range(3)]
    assert sorted(path.name for path in found.path.glob("*.bin")) == files


def test_what_goes_wrong_on_another_machine_fails_the_save_and_is_told(tmp_path: Path) -> None:
    def write(folder: Path, origin: Origin, *rest: Any) -> list[tuple[str, Piece]]:
        if origin.rank == 2:
            raise OSError("the disk is on fire")
        return write_parts(folder, origin, *rest)

    with patch("shoal.resilience.saver.write_parts", write):
        reason = save_once(tmp_path)
    assert "the machine of rank 2: the disk is on fire" in reason
    left = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["failed"]


def test_a_disk_that_is_full_from_the_start_holds_no_machine_up(tmp_path: Path) -> None:
    """Rank 0's machine gives up at once: the other one may never have seen the folder."""
    began = time.monotonic()
    with patch("shoal.resilience.saver.require_room", side_effect=OSError("no room")):
        reason = save_once(tmp_path)
    assert "no room" in reason
    assert time.monotonic() - began < 15  # and not the 30 s after which nothing is waited for any more


def test_a_machine_whose_ranks_ended_holds_nobody_up(tmp_path: Path) -> None:
    """Rank 2 is gone before it hands anything over: its machine says so when it is asked to stop."""
    with two_machines(tmp_path, (HEAD, OTHER)) as (head, other):
        ways = ways_of_both([head, other], (HEAD, OTHER))
        began = time.monotonic()

        def stop() -> None:
            other.settle(1.0)

        run_with(lambda: run_ranks(3, hand_over, ways, 2), stop, tmp_path)
        assert time.monotonic() - began < 20
    (failed,) = events(tmp_path, "save failed")
    assert "the machine of rank 2: its ranks have ended" in failed["reason"]


def run_with(ranks: Callable[[], Any], then: Callable[[], None], folder: Path) -> None:
    """`then` once the save is open for the other machine; ranks of the head wait for it meanwhile."""
    thread = threading.Thread(target=ranks)
    thread.start()
    while not list((folder / "checkpoints").glob("step-*.tmp/open")):
        time.sleep(0.02)
    then()
    thread.join(30)
    assert not thread.is_alive()


def test_a_save_of_an_epoch_that_is_over_does_not_count(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    folder_of(run).mkdir(exist_ok=True)
    assert claim(run, Epoch(2, "another machine", "10.0.0.2", 1))
    theirs = start(run.checkpoints, 5)
    open_for_others(theirs, HEAD._replace(epoch=2), "theirs")
    reason = save_once(tmp_path, deadline_s=1.0)
    assert "another machine leads the run since epoch 2, and this save is of epoch 1" in reason
    assert (theirs / "open").read_text() == "2 theirs"  # what they write is theirs


def test_a_machine_that_is_not_the_first_takes_its_files_back_when_it_fails(tmp_path: Path) -> None:
    """So that there is room to say it, and what it says comes at once, whatever it was."""
    left: list[str] = []

    def write(folder: Path, origin: Origin, *rest: Any) -> list[tuple[str, Piece]]:
        written = write_parts(folder, origin, *rest)
        if origin.rank == 2:
            raise RuntimeError("can't start new thread")
        return written

    def leave(aside: Path, *rest: Any) -> None:
        left.extend(path.name for path in aside.glob("rank-00002*"))
        leave_part(aside, *rest)

    with (
        patch("shoal.resilience.saver.write_parts", write),
        patch("shoal.resilience.saver.leave_part", leave),
    ):
        reason = save_once(tmp_path)
    assert "the machine of rank 2: RuntimeError: can't start new thread" in reason and not left


def test_parts_come_back_as_they_were(tmp_path: Path) -> None:
    written = [("a.b", Piece((0, 2), (4, 1), "rank-00002.bin", 64, (7, 8)))]
    aside = start(tmp_path, 3)
    open_for_others(aside, HEAD, "id")
    leave_part(aside, OTHER, "id", written)
    moved: list[None] = []
    found = collect(aside, HEAD, "id", lambda: None, lambda: moved.append(None), 5.0)
    assert found == written and moved
    assert not list(aside.iterdir())


def test_a_part_of_another_save_does_not_count(tmp_path: Path) -> None:
    aside = start(tmp_path, 3)
    open_for_others(aside, HEAD, "id")
    leave_part(aside, OTHER, "another", [])
    with pytest.raises(OSError, match=r"the machine of rank 2 nothing has come for 0\.3 s"):
        collect(aside, HEAD, "id", lambda: None, lambda: None, 0.3)


def test_a_folder_that_is_not_opened_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    aside = start(tmp_path, 3)
    for share, save in ((HEAD, "of another save"), (HEAD._replace(epoch=2), "id")):
        open_for_others(aside, share, save)
        with pytest.raises(OSError, match=r"did not open .* within 0\.2 s"):
            wait_until_open(aside, OTHER, "id", lambda: None, 0.2)


def test_only_saves_that_are_open_and_not_answered_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create()
    answered, waiting, ours, later = (start(run.checkpoints, step) for step in (1, 2, 3, 4))
    for aside in (answered, waiting):
        open_for_others(aside, HEAD, "id")
    open_for_others(later, HEAD._replace(epoch=2), "id")
    leave_part(answered, OTHER, "id", [])
    refuse_open(run, OTHER, "no ranks")
    assert json.loads((answered / "part-00002.json").read_text())["problem"] == ""
    assert json.loads((waiting / "part-00002.json").read_text())["problem"] == "no ranks"
    assert not list(ours.iterdir())
    assert [path.name for path in later.iterdir()] == ["open"]  # of ranks that this machine has none of
