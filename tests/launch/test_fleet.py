"""What is said of ranks whose machine is not heard: nothing, until it is heard again or lost."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.launch import watch as watches
from shoal.launch.failure import find_culprit
from shoal.launch.nodes.channel import Channel
from shoal.launch.nodes.fleet import Fleet, Member
from shoal.launch.progress import CallWatch
from shoal.launch.watch import Watch
from shoal.observe.status import RankStatus
from shoal.run import Run

SILENCE_S = 2.0


class Said:
    """A channel over which a machine says all it has to say at once, after so many seconds of nothing."""

    still_s = 0.0

    def __init__(self, message: dict[str, Any], after_s: float) -> None:
        self._message, self._at, self._heard = message, time.monotonic() + after_s, time.monotonic()
        self._reads, self._writes = os.pipe()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def fileno(self) -> int:
        return self._reads

    def receive(self) -> list[dict[str, Any]]:
        if time.monotonic() < self._at:
            return []
        self._heard = time.monotonic()
        said, self._message = self._message, {}
        return [said] if said else []

    def send(self, message: dict[str, Any]) -> None:
        """To nobody."""

    def close(self) -> None:
        """It is closed by the test, whoever gave it up."""

    def end(self) -> None:
        os.close(self._reads)
        os.close(self._writes)


def status_of(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.status"
    RankStatus(path, rank).enter("forward", 3)
    return base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def fleet(tmp_path: Path) -> Generator[Fleet]:
    """Machine `a` has rank 0 and `b` has ranks 1 and 2, which ran when they were heard last."""
    made = Fleet(SILENCE_S, "a", ranks=3)
    made.open()
    for name, ranks in (("a", range(1)), ("b", range(1, 3))):
        member = Member(cast(Channel, Said({}, 0.0)), name, "", len(ranks), ranks, stopped=False)
        made.members.append(member)
        files = {f"{rank}.status": status_of(tmp_path, rank) for rank in ranks}
        begun = [(at, 100 + rank, None, time.time()) for at, rank in enumerate(ranks)]
        made.heard(member, {"files": files, "events": begun})
    yield made
    made.close({})


def verdict(fleet: Fleet, folder: Path, after_s: float, codes: dict[int, int]) -> str:
    """The headline, where rank 0 is aborted after a long wait, and `b` says after some seconds how its ranks ended."""
    run, now = Run(folder / "run"), time.time()
    run.create()
    ends = [(at, 101 + at, code, now - 0.1) for at, code in codes.items()]
    channels = Said({"events": [(0, 100, -6, now + 60.0)]}, 0.0), Said({"events": ends}, after_s)
    for member, channel in zip(fleet.members, channels, strict=True):
        member.channel = cast(Channel, channel)
    watch = Watch(run, fleet, fleet.requests, 9.0, CallWatch([range(3)]), fleet.folder, is_here=False)
    try:
        scene = watch.until_end()
        assert scene is not None
        return find_culprit(scene).headline
    finally:
        for channel in channels:
            channel.end()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "SETTLE_S", 0.5)


def test_no_rank_is_called_stuck_before_its_machine_is_heard_again(fleet: Fleet, tmp_path: Path) -> None:
    headline = verdict(fleet, tmp_path, SILENCE_S - 0.5, {1: -9})
    assert headline == "rank 2 was killed by SIGKILL in step 3, phase forward"


def test_a_machine_that_is_not_heard_again_is_named_and_none_of_its_ranks_is_stuck(
    fleet: Fleet, tmp_path: Path
) -> None:
    assert verdict(fleet, tmp_path, 60.0, {}) == "b is gone, with ranks 1, 2: it was not heard for 2 s"


def test_who_leads_and_stood_still_is_named_and_not_who_gave_it_up(fleet: Fleet) -> None:
    for still_s, name in ((7.0, "a"), (SILENCE_S / 2, "b")):
        channel = Said({}, 0.0)
        channel.still_s = still_s
        member = Member(cast(Channel, channel), "b", "", 2, range(1, 3), stopped=False)
        fleet.members[1:], fleet.gone = [member], None
        fleet._lose(member, "the connection was closed")
        channel.end()
        gone = fleet.gone
        assert gone is not None and (gone.name, "gave it up" in gone.why) == (name, name == "a")
