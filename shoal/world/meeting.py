"""`Meeting`: what ranks settle over the store, without a collective: to arrive, to agree, to tell.

[Note: one verdict] Each rank writes a remark and adds one to a counter. The rank whose addition completes
the count reads all remarks and writes the verdict, for which everyone waits: so all ranks return, or all
raise the same error, and a rank costs the store a constant number of calls however many ranks there are.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


class WorldError(RuntimeError):
    """Ranks could not form a world, or do not agree; the message names the ranks."""


class DeadlineError(WorldError, TimeoutError):
    """Some ranks did not come in time; the message names them."""


@dataclass(eq=False)
class Meeting:
    """Numbered meetings of `size` ranks over `store`: every rank calls the same methods in the same order."""

    store: dist.Store
    rank: int
    size: int
    deadline_s: float
    _number: int = 0
    _done: list[str] = field(default_factory=list)

    def meet(self, what: str, remark: str = "", deadline_s: float | None = None) -> None:
        """Return when every rank has called this with the same `what` and no remark.

        Raises:
            DeadlineError: naming the ranks that did not come.
            WorldError: on all ranks: their remarks, or that they met for different things.
        """
        key = self._next("meet")
        mine = f"{key}/{self.rank}"
        self.store.set(mine, f"{what}\n{remark}")
        if self.store.add(f"{key}/count", 1) == self.size:
            self.store.set(f"{key}/verdict", self._verdict(key))
        self._wait(f"{key}/verdict", what, key, self.deadline_s if deadline_s is None else deadline_s)
        verdict = self.store.get(f"{key}/verdict").decode()
        self._forget([mine] + [f"{key}/count", f"{key}/verdict"] * (self.rank == 0))
        if verdict:
            raise WorldError(verdict)

    def refuse(self, problem: str) -> None:
        """End the next meeting for all ranks before it begins: this rank cannot come to it.

        Raises:
            WorldError: always, here and on every rank that waits in that meeting.
        """
        self.store.set(f"{self._next('meet')}/verdict", problem)
        raise WorldError(problem)

    def agree(self, name: str, text: str) -> None:
        """Return when every rank has the same `text`.

        Raises:
            WorldError: on all ranks, naming those that differ from rank 0 and their first difference.
        """
        first = self.tell(text if self.rank == 0 else None, 0)
        remark = ""
        if text != first:
            remark = f"rank {self.rank} differs from rank 0 in the {name}: {first_difference(text, first)}"
        self.meet(f"agree on the {name}", remark)

    def tell(self, text: str | None, src: int) -> str:
        """Give the text of rank `src` to every rank."""
        key = self._next("text")
        if self.rank == src:
            if text is None:
                raise ValueError(f"rank {src} is the source of a broadcast and gave no text")
            self.store.set(key, text)
            self._done.append(key)
            return text
        self._wait(key, f"text from rank {src}", None, self.deadline_s)
        return self.store.get(key).decode()

    def leave(self, wait_s: float) -> None:
        """Say that this rank needs the store no more; rank 0, who may hold it, waits a little for all."""
        gone = self.store.add("left", 1)
        end = time.monotonic() + wait_s
        while self.rank == 0 and gone < self.size and time.monotonic() < end:
            time.sleep(0.005)
            gone = self.store.add("left", 0)

    def _next(self, kind: str) -> str:
        self._number += 1
        return f"{kind}/{self._number}"

    def _forget(self, keys: list[str]) -> None:
        """Delete the keys of the meeting before: whoever has come to this one has left that one."""
        for key in self._done:
            self.store.delete_key(key)
        self._done = keys

    def _verdict(self, key: str) -> str:
        values = self.store.multi_get([f"{key}/{rank}" for rank in range(self.size)])
        places: dict[str, list[int]] = {}
        remarks: list[str] = []
        for rank, value in enumerate(values):
            what, _, remark = value.decode().partition("\n")
            places.setdefault(what, []).append(rank)
            remarks += [remark] * bool(remark)
        if len(places) > 1:
            at = "; ".join(f"{ranks_text(ranks)} at {what!r}" for what, ranks in places.items())
            return f"ranks wait for each other in different places: {at}; every rank must make the same calls"
        return "\n".join(dict.fromkeys(remarks))

    def _wait(self, key: str, what: str, arrivals: str | None, deadline_s: float) -> None:
        """Poll, so that signal handlers run meanwhile; a blocking wait in the store would hold them back."""
        start, pause = time.monotonic(), 0.0005
        longest = max(0.05, self.size / 20_000)  # at most 20,000 polls a second reach the store
        try:
            while not self.store.check([key]):
                if time.monotonic() - start > deadline_s:
                    raise DeadlineError(self._missing(what, arrivals, deadline_s))
                time.sleep(pause)
                pause = min(longest, pause * 1.5)
        except dist.DistError as error:
            raise WorldError(
                f"rank {self.rank} at {what!r}: the store that connects the ranks is gone, so rank 0 or its "
                f"launcher has ended; look for its error first ({error})"
            ) from error

    def _missing(self, what: str, arrivals: str | None, deadline_s: float) -> str:
        if arrivals is None:
            return f"rank {self.rank} waited {deadline_s:g} s for {what}, which never came"
        missing = [rank for rank in range(self.size) if not self.store.check([f"{arrivals}/{rank}"])]
        return (
            f"rank {self.rank} waited {deadline_s:g} s at {what!r} for {ranks_text(missing)} of {self.size}; "
            "look at what they were doing (their logs and status), or raise the deadline"
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2, 5`; long lists are cut.

    Example:
        >>> ranks_text([1, 2])
        'ranks 1, 2'
    """
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown or 'none'}"


def first_difference(ours: str, theirs: str) -> str:
    """The first keys (of TOML) or line in which two texts differ: `optimizer.lr = 0.001 against 0.0003`."""
    try:
        mine, other = dict(_flat(tomllib.loads(ours))), dict(_flat(tomllib.loads(theirs)))
    except tomllib.TOMLDecodeError:
        return _first_line(ours, theirs)
    keys = [key for key in {**mine, **other} if mine.get(key, _UNSET) != other.get(key, _UNSET)]
    if not keys:
        return _first_line(ours, theirs)
    shown = [f"{key} = {mine.get(key, _UNSET)!r} against {other.get(key, _UNSET)!r}" for key in keys[:3]]
    return "; ".join(shown) + (f"; and {len(keys) - 3} more" if len(keys) > 3 else "")


class _Unset:
    def __repr__(self) -> str:
        return "nothing"


_UNSET = _Unset()


def _flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _first_line(ours: str, theirs: str) -> str:
    mine, other = ours.splitlines(), theirs.splitlines()
    for number in range(max(len(mine), len(other))):
        a, b = (lines[number] if number < len(lines) else None for lines in (mine, other))
        if a != b:
            return f"line {number + 1} is {a!r} against {b!r}"
    return "line endings"
