"""One rank: its files, its signals, its world, and what is left to read when it fails."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO, cast

from shoal.config import Settings
from shoal.launch.errors import RankError, RankFiles, describe
from shoal.observe import host
from shoal.observe.health import health_watched
from shoal.observe.status import RankStatus
from shoal.resilience.faults import STRUCK, FaultyStatus, drawn, parse_faults
from shoal.run import Run, size_of

if TYPE_CHECKING:
    from shoal.world import World

TRAIN = "shoal.train.loop:train"
SAME_STOP_S = 2.0  # a terminal and a launcher both pass on one Ctrl-C; what comes so close is one request

Target = Callable[[Settings, "World", RankStatus, "StopFlag"], None]


@dataclass(eq=False)
class StopFlag:
    """Whether somebody asked this rank to stop: the loop finishes its step, saves and returns.

    The first SIGTERM or SIGINT asks; a second one, later than `SAME_STOP_S`, ends the process at once.

    Example:
        >>> StopFlag().requested
        False
    """

    requested: bool = False
    reason: str = ""
    patient: bool = True
    """false: nothing is there to save yet, and a signal ends the process at once"""
    _first: float = 0.0

    def ask(self, reason: str) -> None:
        if not self.requested:
            self.requested, self.reason, self._first = True, reason, time.monotonic()

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.patient or (self.requested and time.monotonic() - self._first > SAME_STOP_S):
            os._exit(128 + number)
        self.ask(signal.Signals(number).name)


def run_rank(
    settings: Settings,
    target: str,
    rank: int,
    open_world: Callable[[], World],
    local_size: int,
    size: int,
    *,
    patient: bool = True,
) -> RankError | None:
    """Be a rank until it ends: its output in its log, its place in its status, its error in its error file.

    `open_world` is called with everything else in place, so that what it raises is recorded too. Not `patient`: a signal
    ends the process at once, until the target says otherwise of its `StopFlag`.
    """
    run = Run(Path(settings.run.dir))
    run.create()
    files = RankFiles.of(run.ranks, rank)
    files.clear()
    status, stop = _status_of(settings, files, rank, size), StopFlag(patient=patient)
    stop.listen()
    error: RankError | None = None
    with _stacks_on_request(files.stack), _output(files.log, terminal=rank == 0) as log:
        try:
            _set_threads(settings, local_size)
            function = find(target)
            with open_world() as world:
                try:
                    with _collectives(settings, world, files.calls):
                        function(settings, world, status, stop)
                    status.finish(status.read().step)
                except BaseException as raised:
                    error = _record(raised, status, files, log)  # before closing, which can take its time
                    world.close(wait=False)
        except BaseException as raised:
            error = error or _record(raised, status, files, log)
    return error


def _collectives(settings: Settings, world: World, path: Path) -> contextlib.AbstractContextManager[None]:
    """What notes a rank's collectives; nothing, for a rank that is alone or if nobody wants it."""
    how = settings.run.collectives
    if how == "off" or world.size == 1:
        return contextlib.nullcontext()
    from shoal.observe.calls import CallFile
    from shoal.resilience.collectives import seen

    return seen(CallFile(path), world, compared=how == "compare")


def _status_of(settings: Settings, files: RankFiles, rank: int, size: int) -> RankStatus:
    asked = parse_faults(settings.run.faults)
    if not asked:
        return RankStatus(files.status, rank)
    return FaultyStatus(files.status, rank, drawn(asked, size, settings.train.steps))


def run_worker(settings: Settings, *, device: str = "auto", target: str = TRAIN, patient: bool = True) -> int:
    """Be one rank of a world that torchrun, srun, mpirun or a Kubernetes operator started; the exit code.

    There is no launcher of ours to tell the story then: a rank that fails prints it, and one that was only
    stopped by another's failure says by whose. `patient` is as for `run_rank`.

    Raises:
        PlaceError: the launcher's variables are incomplete or impossible.
        ValueError: the run directory cannot be written.
    """
    from shoal.launch.failure import own_report
    from shoal.world import join_world
    from shoal.world.environments import detect

    place = detect(os.environ)

    def open_world() -> World:
        policy = settings.run
        return join_world(
            backend=policy.backend,
            init_method=policy.init_method,
            deadline_s=policy.deadline_s,
            device=device,
        )

    run = Run(Path(settings.run.dir))
    run.create()
    if place.rank == 0:
        (run.ranks / STRUCK).unlink(missing_ok=True)
    local_size = place.local_size or 1
    watching = place.local_rank == 0 or place.size == 1  # one rank a node
    with contextlib.ExitStack() as stack:
        if place.rank == 0:
            stack.enter_context(run.locked())
        if watching:
            watch = health_watched(
                run, local_size, device=device, environment=os.environ, first_rank=place.rank
            )
            stack.enter_context(watch)
        error = run_rank(settings, target, place.rank, open_world, local_size, place.size, patient=patient)
    if error is None:
        return 0
    report = own_report(Path(settings.run.dir) / "ranks", error, place.size)
    sys.stderr.write(f"{report}\n")  # in one write, so that reports of several ranks do not mix
    sys.stderr.flush()
    _tell_torchrun(error, report)
    return 1


def find(target: str) -> Target:
    """The function that a `package.module:function` names.

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, name = target.partition(":")
    try:
        return cast(Target, getattr(importlib.import_module(module), name))
    except AttributeError:
        raise ValueError(
            f"target = {target!r}: module {module} has no {name!r}; expected module:function"
        ) from None


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent `parent` ends, however it ends (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it ended before the call


def _record(error: BaseException, status: RankStatus, files: RankFiles, log: TextIO) -> RankError | None:
    """Write down why this rank ends; leaving with exit code 0 is an end before the others, not an error."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        status.finish(status.read().step)
        return None
    record = describe(error, status.read())
    status.fail(record.brief())  # where a full disk cannot hide the error that it may have caused
    with contextlib.suppress(OSError):
        record.write(files.error)
    with contextlib.suppress(OSError):
        log.write(record.traceback)
        log.flush()
    return record


def _set_threads(settings: Settings, local_size: int) -> None:
    import torch

    torch.set_num_threads(settings.run.threads or max(1, int(host.cores()) // local_size))


@contextlib.contextmanager
def _stacks_on_request(path: Path) -> Generator[None, None, None]:
    """On SIGUSR1 write the main thread's Python stack to `path`, even from inside a call into C++.

    Not those of all threads: they run on meanwhile, and ranks that compiled died of it by SIGSEGV (torch 2.11, Python 3.12).
    """
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # afterwards as well: asked while it leaves, a rank must not die of it
    with path.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    if size_of(path) == 0:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _output(path: Path, terminal: bool) -> Generator[TextIO, None, None]:
    """Write what this process prints to `path`: with `terminal` as well, else only, C++ messages included."""
    with path.open("a", encoding="utf-8", buffering=1) as log:
        before = sys.stdout, sys.stderr
        saved = [] if terminal else [os.dup(1), os.dup(2)]
        for number, _ in enumerate(saved, start=1):
            before[number - 1].flush()
            os.dup2(log.fileno(), number)
        if terminal:
            sys.stdout, sys.stderr = (cast(TextIO, Tee(stream, log)) for stream in before)
        try:
            yield log
        finally:
            for stream in before:
                with contextlib.suppress(BrokenPipeError):
                    stream.flush()
            sys.stdout, sys.stderr = before
            for number, copy in enumerate(saved, start=1):
                os.dup2(copy, number)
                os.close(copy)


class Tee:
    """A terminal's stream whose writes go to a log as well; all else is the terminal's.

    A terminal that has gone, or `head`, which has read enough, is no reason to end a run.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _tell_torchrun(error: RankError, report: str) -> None:
    """Put the message into the file that torchrun's own summary shows, instead of its `error_file: <N/A>`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        import json

        extra = {"py_callstack": error.traceback, "timestamp": str(int(error.time))}
        Path(path).write_text(json.dumps({"message": {"message": report, "extraInfo": extra}}))
