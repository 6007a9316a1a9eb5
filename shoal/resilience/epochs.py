"""Who leads a run on several machines, and since when: an epoch is a file that only one of them can have made.

    <run>/epochs/00000003.json     the third one: who leads it, and where it listens
    <run>/epochs/beat              rewritten by the leader every second
    <run>/epochs/begun             the last epoch in which ranks trained
    <run>/epochs/ended.json        how the run ended, and in which epoch
    <run>/epochs/token             what proves that a machine may write here

An epoch is claimed by a hard link, which fails if there is one: of two machines that cannot see each other one gets it. Each new
set of ranks begins with a new epoch, and what keeps state asks whether its own is still the newest. No clocks are compared: who
leads is alive while its beat changes.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal.run import Run, write_whole

EPOCH = "SHOAL_EPOCH"
"""the environment variable of a rank that has the number of its epoch"""
BEAT_S = 1.0


class Epoch(NamedTuple):
    """A claim: which number, by whom (host and process), and where it listens."""

    number: int
    leader: str
    address: str
    port: int
    after: int = 0
    """the first epoch in which this machine took part, if it takes a run over that goes on"""


def folder_of(run: Run) -> Path:
    return run.path / "epochs"


def claim(run: Run, epoch: Epoch) -> bool:
    """Make an epoch; false if somebody else has made it, or a later one."""
    found = newest(run)
    if found is not None and found.number >= epoch.number:
        return False
    folder = folder_of(run)
    aside = folder / f".{epoch.number}.{secrets.token_hex(4)}.tmp"
    try:
        with aside.open("w") as file:
            json.dump(epoch._asdict(), file)
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, folder / f"{epoch.number:08d}.json")
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    return True


def newest(run: Run) -> Epoch | None:
    """The epoch that counts now; None before the first."""
    names = sorted(path.name for path in folder_of(run).glob("????????.json"))
    return Epoch(**json.loads((folder_of(run) / names[-1]).read_text())) if names else None


def taken_over(run: Run) -> str:
    """For a rank of a run on several machines: why it must not keep anything any more, or nothing."""
    mine, found = os.environ.get(EPOCH), newest(run)
    if mine is None or found is None or found.number <= int(mine):
        return ""
    return f"{found.leader} has taken the run over (epoch {found.number}; this rank is of epoch {mine}), so nothing is saved here"


def note_begin(run: Run, number: int) -> None:
    """Keep that ranks train since an epoch, where a run that is set aside (`run.resume = false`) does not take it along."""
    write_whole(folder_of(run) / "begun", str(number))


def begun_since(run: Run, number: int) -> bool:
    """Whether ranks have trained in an epoch from `number` on, the first that a machine has seen; 0: it has seen none."""
    said = _read(folder_of(run) / "begun")
    return number > 0 and said.isdigit() and int(said) >= number


def note_end(run: Run, number: int, outcome: dict[str, Any]) -> None:
    """Keep how a run ended in an epoch, for machines that could not be told."""
    write_whole(folder_of(run) / "ended.json", json.dumps({"number": number, "outcome": outcome}))


def end_of(run: Run, number: int) -> dict[str, Any] | None:
    """How the run ended in an epoch; None if it did not."""
    try:
        said = json.loads(_read(folder_of(run) / "ended.json"))
    except ValueError:
        return None
    return said["outcome"] if said["number"] == number else None


def token(run: Run) -> bytes:
    """What machines that share the run directory prove to each other; made by the first that asks, readable by its user alone."""
    folder = folder_of(run)
    folder.mkdir(exist_ok=True)
    path, aside = folder / "token", folder / f".token.{secrets.token_hex(4)}.tmp"
    if not path.exists():
        file = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(file, "w") as out:
            out.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
    return bytes.fromhex(path.read_text())


class Beat:
    """A leader's sign of life in the run directory, while the block runs."""

    def __init__(self, run: Run) -> None:
        self._path = folder_of(run) / "beat"
        self._ends = threading.Event()
        self._name = secrets.token_hex(4)
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _go_on(self) -> None:
        number, aside = 0, self._path.with_name(f".beat.{self._name}.tmp")
        while True:
            number += 1
            with suppress(OSError):  # a full disk; the leader is looked for over the network first
                aside.write_text(f"{self._name} {number}")
                aside.replace(self._path)
            if self._ends.wait(BEAT_S):
                return


def beats(run: Run, within_s: float) -> bool:
    """Whether a leader gives a sign of life within so many seconds."""
    path, until = folder_of(run) / "beat", time.monotonic() + within_s
    first = _read(path)
    while time.monotonic() < until:
        time.sleep(0.1)
        if _read(path) != first:
            return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
