"""A save that several machines write together: each what its own ranks handed over, into one folder that all of them see.

The machine of rank 0 makes the folder and says in it of which save it is; the others wait for that, write their ranks' files, and
leave a list of what lies where. When all lists are there it writes the index and seals the folder. What goes wrong on a machine
stands in its list. No machine talks to another: a save ends well when all ranks have ended meanwhile, and who leads is not asked,
but for whether the run is still this epoch's.

    step-00000100.tmp/open              the epoch and the save's id, while others may write into the folder
    step-00000100.tmp/part-00002.json   what the machine whose first rank is 2 has written

    step-00000100.tmp/failed            the same as `open`, of a save that was given up: who has not met the folder need not wait

All are gone before the folder is sealed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.layout import Piece
from shoal.resilience.epochs import newest
from shoal.run import Run, write_whole

OPEN, FAILED = "open", "failed"
POLL_S = 0.1
Written = list[tuple[str, Piece]]


class Share(NamedTuple):
    """The ranks of one machine among all that save together."""

    first: int
    """the number of its first rank"""
    ranks: int
    size: int
    """ranks of all machines"""
    firsts: tuple[int, ...]
    """the number of the first rank of each machine"""
    epoch: int | None
    """in which they train; None: they are all on one machine"""

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.ranks)

    @property
    def heads(self) -> bool:
        """Whether rank 0 is among them."""
        return self.first == 0

    @property
    def others(self) -> list[int]:
        """First ranks of the other machines."""
        return [first for first in self.firsts if first != self.first]


def open_for_others(aside: Path, share: Share, save: str) -> None:
    """Let other machines write into a fresh folder, and whoever meets it see whose it is."""
    write_whole(aside / OPEN, f"{share.epoch} {save}")


def say_failed(aside: Path, share: Share, save: str) -> None:
    """Leave word, where the folder was, that nothing is written into it any more."""
    with suppress(OSError):
        aside.mkdir(parents=True, exist_ok=True)
        write_whole(aside / FAILED, f"{share.epoch} {save}")


def is_open(aside: Path, share: Share, save: str) -> bool:
    """Whether the folder is of this save, and not sealed yet."""
    return _read(aside / OPEN) == f"{share.epoch} {save}"


def wait_until_open(
    aside: Path, share: Share, save: str, still: Callable[[], None], patience_s: float
) -> None:
    """Until the folder is there, and of this save.

    Args:
        still: called every now and then; raises when the save is not wanted any more.

    Raises:
        OSError: it was not there in time.
    """
    until = time.monotonic() + patience_s
    while not is_open(aside, share, save):
        still()
        if _read(aside / FAILED) == f"{share.epoch} {save}":
            raise OSError("the machine of rank 0 has given the save up")
        if time.monotonic() > until:
            raise OSError(f"the machine of rank 0 did not open {aside} within {patience_s:g} s")
        time.sleep(POLL_S)


def wait_until_sealed(
    aside: Path,
    share: Share,
    save: str,
    still: Callable[[], None],
    moved: Callable[[], None],
    patience_s: float,
) -> None:
    """Until the machine of rank 0 is done with the folder, or nothing has moved for so long.

    Ranks that went on to the next save would wait for those of rank 0's machine, inside a collective, with its deadline.

    Args:
        still, moved: as in `collect`.
    """
    seen, since = -1, time.monotonic()
    while is_open(aside, share, save) and time.monotonic() - since < patience_s:
        still()
        if (size := _written(aside)) != seen:
            seen, since = size, time.monotonic()
            moved()
        time.sleep(POLL_S)


def leave_part(aside: Path, share: Share, save: str, written: Written, problem: str = "") -> None:
    """Say what this machine has written, or why it could not."""
    told = {"save": save, "problem": problem, "written": written}
    write_whole(aside / _part_of(share.first), json.dumps(told))


def collect(
    aside: Path,
    share: Share,
    save: str,
    still: Callable[[], None],
    moved: Callable[[], None],
    patience_s: float,
) -> Written:
    """What all other machines have written, once all of them have; the folder is theirs no more.

    Args:
        still: as in `wait_until_open`. moved: called when they have written more.

    Raises:
        OSError: one of them could not, or nothing was written for so long.
    """
    found: Written = []
    left, seen, since = share.others, -1, time.monotonic()
    while left:
        still()
        for first in list(left):
            told = json.loads(_read(aside / _part_of(first)) or "{}")
            if told.get("save") == save:
                if told["problem"]:
                    raise OSError(f"the machine of {_ranks_from(first, share)}: {told['problem']}")
                found += [(name, _piece(*piece)) for name, piece in told["written"]]
                left.remove(first)
        if (size := _written(aside)) != seen:
            seen, since = size, time.monotonic()
            moved()
        elif time.monotonic() - since > patience_s:
            raise OSError(
                f"of the machine of {_ranks_from(left[0], share)} nothing has come for {patience_s:g} s"
            )
        if left:
            time.sleep(POLL_S)
    (aside / OPEN).unlink()
    for first in share.others:
        (aside / _part_of(first)).unlink()
    return found


def refuse_open(run: Run, share: Share, why: str) -> None:
    """Tell saves of this epoch that wait for this machine that it writes nothing: its ranks have ended."""
    with suppress(OSError):
        for aside in run.checkpoints.glob("step-*.tmp"):
            # in this order: who collects closes the folder before it removes the parts
            answered = (aside / _part_of(share.first)).exists()
            epoch, _, save = _read(aside / OPEN).partition(" ")
            if save and epoch == str(share.epoch) and not answered:
                leave_part(aside, share, save, [], why)


def who_took_over(run: Run, share: Share) -> str:
    """What to say if another set of ranks trains since, maybe on machines that this one does not see; empty if none does."""
    found = newest(run) if share.epoch is not None else None
    if found is None or share.epoch is None or found.number <= share.epoch:
        return ""
    return f"{found.leader} leads the run since epoch {found.number}, and this save is of epoch {share.epoch}"


def require_epoch(run: Run, share: Share) -> None:
    """
    Raises:
        OSError: another set of ranks trains since.
    """
    if problem := who_took_over(run, share):
        raise OSError(problem)


def _written(aside: Path) -> int:
    """Bytes of all ranks' files so far."""
    try:
        return sum(path.stat().st_size for path in aside.glob("*.bin"))
    except OSError:
        return 0


def _part_of(first: int) -> str:
    return f"part-{first:05d}.json"


def _piece(offsets: list[int], sizes: list[int], file: str, at: int, crc32: list[int]) -> Piece:
    return Piece(tuple(offsets), tuple(sizes), file, at, tuple(crc32))


def _ranks_from(first: int, share: Share) -> str:
    later = [other for other in share.firsts if other > first]
    last = min(later, default=share.size) - 1
    return f"rank {first}" if last == first else f"ranks {first} to {last}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
