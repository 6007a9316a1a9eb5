"""`Run`: what happened, as a directory. Every file in it is documented in docs/run.md and appears only when complete.

A file is written aside, flushed and renamed, so that a reader sees the old one or the new one and nothing between.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from shoal.job import Section


class CheckpointPolicy(Section):
    """When checkpoints are written and how many stay."""

    every: int = Field(0, ge=0, description="optimizer steps between checkpoints; 0: only at the end")
    last: bool = Field(True, description="also write one when the run ends")
    keep: int = Field(2, ge=2, description="newest complete checkpoints that are kept")
    memory_every: int = Field(
        0,
        ge=0,
        description="steps between copies of the state in this machine's memory, for restarts; 0: none",
    )
    asynchronous: bool = Field(
        True,
        description="ranks only copy what they save every so many steps, and do not wait until it is written",
    )

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_two(cls, value: Any) -> Any:
        if value == 1:
            raise ValueError(
                "1 is too few: if the newest turns out damaged, a run goes on from the one before"
            )
        return value


class RunPolicy(Section):
    """Where a run lives and how it is started; none of it changes a number."""

    dir: str = Field("runs/latest", min_length=1, description="the run directory")
    resume: bool = Field(
        True,
        description="go on from the newest complete checkpoint in the directory; false: set aside what is there",
    )
    data: str | None = Field(None, description="the prepared data folder; left out: made under run.cache")
    cache: str = Field("~/.cache/shoal", description="prepared data that runs share")
    search: bool = Field(
        False,
        description="on GPUs, a plan that gives no degree is searched for by simulation; false: rules choose it",
    )
    log_every: int = Field(1, ge=1, description="steps between lines on the terminal")
    tensorboard: bool = Field(False, description="also write TensorBoard events (needs shoal[tensorboard])")
    backend: str = Field(
        "auto", description='"auto" (nccl on GPUs, gloo on CPUs), "nccl", "gloo" or "cpu:gloo,cuda:nccl"'
    )
    init_method: str = Field("env://", description='"env://", "tcp://host:port" or "file:///path"')
    deadline_s: float = Field(600.0, gt=0, description="longest wait for another rank, seconds")
    nodes: str = Field(
        "",
        pattern=r"^([1-9][0-9]*(:[1-9][0-9]*)?)?$",
        description='machines that each run `shoal train` with this run.dir: "4", or "2:4" for as many as are there; '
        "left out: this one alone",
    )
    ranks_per_node: int | None = Field(
        None,
        ge=1,
        description="ranks of each machine, with run.nodes; left out: one a GPU, or the plan's share",
    )
    interface: str | None = Field(
        None,
        description="network interface by which machines reach this one; left out: that of the default route",
    )
    node_deadline_s: float = Field(
        10.0, ge=2, description="a machine that is not heard for so long is lost, seconds"
    )
    nodes_wait_s: float = Field(600.0, gt=0, description="longest wait for machines to come, seconds")
    collectives: Literal["note", "compare", "off"] = Field(
        "note",
        description='"note": what each rank calls is kept for reports; "compare": ranks also tell each other before each call, '
        'for debugging; "off": neither',
    )

    @field_validator("collectives", mode="before")
    @classmethod
    def _of_earlier_runs(cls, value: Any) -> Any:
        return "note" if value == "auto" else value  # once the default, which job.toml of a run has

    compare_every: int = Field(
        0, ge=0, description="steps between comparisons of replicas; 0: only when state is kept"
    )
    restarts: int = Field(
        3, ge=0, description="how often in a row a failed run is started again without getting any further"
    )

    @field_validator("nodes", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @property
    def nodes_from_to(self) -> tuple[int, int] | None:
        """The fewest and the most machines; None for a run on one."""
        least, _, most = self.nodes.partition(":")
        return (int(least), int(most or least)) if least else None

    faults: str = Field(
        "", description='failures to inject, such as "kill rank=1 step=7; hang rank=0 step=9"'
    )
    threads: int | None = Field(None, ge=1, description="CPU threads a rank; left out: cores / ranks")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it appears complete or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several processes do not mix."""
    line = json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


@contextmanager
def told_if_lost() -> Iterator[None]:
    """Around writing what a run can do without: an error of the disk is told on stderr."""
    try:
        yield
    except OSError as error:
        print(f"not written: {error}", file=sys.stderr, flush=True)


GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""what a file system says of a file that is not there, or not any more"""


def text_of(path: Path) -> str:
    """What a file says; nothing where there is none, which another process can bring about between a look and a read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno in GONE:
            return ""
        raise


def size_of(path: Path) -> int | None:
    """Bytes of a file; None where there is none, which another process can bring about at any time."""
    try:
        return path.stat().st_size
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a .jsonl file; a line cut short by a crash is left out."""
    for line in text_of(path).splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


@dataclass(frozen=True)
class Run:
    """A run directory.

    Example:
        >>> Run(Path("runs/a")).checkpoints
        PosixPath('runs/a/checkpoints')
    """

    path: Path

    @property
    def job_file(self) -> Path:
        return self.path / "job.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """Logs, status and errors by rank."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def create(self) -> None:
        """Make the directory.

        Raises:
            ValueError: naming the directory, when it cannot be written.
        """
        try:
            for folder in (self.path, self.ranks, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:  # each rank tries a file of its own
                file.write(b"1")
        except OSError as error:
            raise ValueError(
                f"run.dir = {str(self.path)!r} cannot be written: {error}; choose another run.dir"
            ) from error

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the directory: two runs at once in one directory would mix their files. `shared`: with others of the same run.

        Raises:
            ValueError: another run holds it.
        """
        with (self.path / ".lock").open("a+") as file:  # a shared lock on NFS needs reading
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"run.dir = {str(self.path)!r} is in use by another run; wait for it, or choose another run.dir"
                ) from None
            yield

    def set_aside(self) -> Path | None:
        """Move what an earlier run left into a folder of its own; returns that folder, if there was anything."""
        left = [path for path in (self.checkpoints, self.metrics_file, self.events_file) if path.exists()]
        if not any(path.is_file() or any(path.iterdir()) for path in left):
            return None
        number = next(n for n in range(1, 10_000) if not (self.path / f"earlier-{n}").exists())
        aside = self.path / f"earlier-{number}"
        aside.mkdir()
        for path in (*left, self.job_file):
            if path.exists():
                path.rename(aside / path.name)
        self.checkpoints.mkdir()
        return aside

    def event(self, kind: str, **details: Any) -> None:
        """Append a line to events.jsonl; `time` is seconds since the epoch. A full disk loses the line, and not the run."""
        with told_if_lost():
            append_json(self.events_file, {"time": round(time.time(), 3), "event": kind, **details})
