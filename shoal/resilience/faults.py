"""Failures on request: `run.faults` says which rank fails how and where, so that people and tests see what a run does about it.

    run.faults="kill rank=1 step=7; hang rank=0 step=9 phase=update; seed=3 count=2"

Each strikes once in a run, also if its step is taken again after a restart.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.observe.status import RankStatus
from shoal.run import text_of

if TYPE_CHECKING:
    from torch import Tensor

STRUCK = "faults.struck"
"""the file in `ranks/` that lists faults that have struck: their place in the setting, and when, in seconds since 1970"""
FLIP = "flip"  # one bit of a parameter, which nothing but a comparison notices
EXTRA = "extra"  # a collective that the others do not make
PARENT = "parent"  # the process that forked the ranks is killed, and they end with it
NODE = "node"  # the launcher of the rank's machine is killed, and all its ranks end with it
LAUNCHER = "SHOAL_LAUNCHER"
"""the environment variable of a rank that has the number of its launcher's process"""
LOADER = "loader"  # one of the rank's loader processes is killed, which the rank replaces
PHASES = ("data", "forward", "reduce", "update", "eval", "save")
SLOW_S = 2.0


class Fault(NamedTuple):
    """One failure: of what kind, on which rank, when `step` steps are done and it enters `phase`."""

    kind: str
    rank: int
    step: int
    phase: str = "forward"
    seconds: float = SLOW_S
    """of a rank that is slow"""


class Seeded(NamedTuple):
    """Faults that a seed draws, when ranks and steps are known."""

    seed: int
    count: int


def parse_faults(text: str) -> list[Fault | Seeded]:
    """Faults as `run.faults` writes them, separated by ";".

    Raises:
        ValueError: naming the part that is not understood and what would be.

    Example:
        >>> parse_faults("kill rank=1 step=7")
        [Fault(kind='kill', rank=1, step=7, phase='forward', seconds=2.0)]
    """
    return [_parse_one(part) for part in map(str.strip, text.split(";")) if part]


def _parse_one(text: str) -> Fault | Seeded:
    first, *rest = text.split()
    words: dict[str, str] = {}
    for word in rest:
        key, _, words[key] = word.partition("=")
    try:
        if first.startswith("seed="):
            found = Seeded(int(first.removeprefix("seed=")), int(words.pop("count", "1")))
        elif first not in ALL_KINDS:
            raise ValueError(f"no kind {first!r}; kinds: {', '.join(ALL_KINDS)}")
        else:
            place = int(words.pop("rank")), int(words.pop("step")), words.pop("phase", "forward")
            found = Fault(first, *place, float(words.pop("seconds", SLOW_S)))
            if found.phase not in PHASES:
                raise ValueError(f"{found.phase} is not known; phases: {', '.join(PHASES)}")
        if words:
            raise ValueError(f"{', '.join(words)} is not known")
    except (KeyError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"run.faults: {text!r}: {said}; expected such as 'kill rank=1 step=7 phase=forward' or 'seed=1 count=2'"
        ) from None
    return found


def drawn(asked: list[Fault | Seeded], ranks: int, steps: int) -> list[Fault]:
    """All faults, those that a seed draws among them.

    Example:
        >>> drawn([Seeded(seed=0, count=1)], ranks=4, steps=10) == drawn([Seeded(seed=0, count=1)], ranks=4, steps=10)
        True
    """
    found: list[Fault] = []
    for one in asked:
        if isinstance(one, Fault):
            found.append(one)
            continue
        source = random.Random(one.seed)
        for _ in range(one.count):
            kind, phase = source.choice(DRAWN), source.choice(PHASES[:4])
            found.append(Fault(kind, source.randrange(ranks), source.randrange(steps), phase))
    return found


def require_possible(faults: list[Fault], ranks: int, steps: int, *, nodes: bool = False) -> None:
    """Raises ValueError for a rank, step or other machine (`nodes`) that is not there: a fault would never strike, or end all.

    On several machines ranks come and go, and one that is not there now may be.
    """
    for fault in faults:
        if fault.kind == NODE and not nodes:
            raise ValueError(
                "run.faults: node ends a launcher, which only a run on several machines (run.nodes) outlives"
            )
        if not 0 <= fault.rank < ranks and not nodes:
            raise ValueError(
                f"run.faults: rank={fault.rank} of a {fault.kind}: this run has ranks 0 to {ranks - 1}"
            )
        if fault.kind == EXTRA and ranks == 1 and not nodes:
            raise ValueError("run.faults: a rank that is alone makes no collective; extra needs two ranks")
        if not 0 <= fault.step <= steps:
            raise ValueError(f"run.faults: step={fault.step} of a {fault.kind}: this run has {steps} steps")


def show_state(status: RankStatus, state: Callable[[], dict[str, Tensor]]) -> None:
    """Give faults, if there are any, the tensors that they may spoil."""
    if isinstance(status, FaultyStatus):
        status.state = state


class FaultyStatus(RankStatus):
    """A rank's status that strikes when the rank says that it enters the phase of a fault."""

    state: Callable[[], dict[str, Tensor]] | None = None

    def __init__(self, path: Path, rank: int, faults: list[Fault]) -> None:
        self._mine = [(number, fault) for number, fault in enumerate(faults) if fault.rank == rank]
        self._struck = path.with_name(STRUCK)
        self._parent = os.getppid()
        super().__init__(path, rank)

    def enter(self, phase: str, step: int) -> None:
        super().enter(phase, step)
        for number, fault in self._mine:
            if (fault.phase, fault.step) == (phase, step) and self._is_first_time(number):
                if fault.kind == FLIP:
                    self._flip()
                elif fault.kind == PARENT:
                    self._end_parent()
                elif fault.kind == NODE:
                    os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL)
                    time.sleep(3600)  # until this rank ends with it
                else:
                    KINDS[fault.kind](fault)

    def _end_parent(self) -> None:
        """Kill the process that forked the ranks, unless it is gone and another process stands in its place."""
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGKILL)
            time.sleep(3600)  # until this rank ends with it

    def _flip(self) -> None:
        """One bit of the first parameter, as a faulty memory would."""
        import torch

        from shoal.train.optimizer import local

        if self.state is not None:
            part = next(part for tensor in self.state().values() if (part := local(tensor)).numel())
            part.view(-1).view(torch.uint8)[0] ^= 1 << 2

    def _is_first_time(self, number: int) -> bool:
        if str(number) in (line.partition(" ")[0] for line in text_of(self._struck).splitlines()):
            return False
        with self._struck.open("a") as file:
            file.write(f"{number} {time.time():.3f}\n")
        return True


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _crash(fault: Fault) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def _abort(fault: Fault) -> None:
    os.abort()


def _leave(fault: Fault) -> None:
    os._exit(7)


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(3600)


def _slow(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _raise(fault: Fault) -> None:
    raise RuntimeError("a fault of run.faults")


def _memory(fault: Fault) -> None:
    import torch

    raise torch.OutOfMemoryError("a fault of run.faults: out of memory")


def _disk(fault: Fault) -> None:
    raise OSError(28, "a fault of run.faults: no space left on device")


def _call_alone(fault: Fault) -> None:
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(3, device=device), op=dist.ReduceOp.MAX)


def _ask_to_stop(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_a_loader(fault: Fault) -> None:
    loaders = multiprocessing.active_children()
    if not loaders or loaders[0].pid is None:
        raise ValueError(
            f"run.faults: loader rank={fault.rank} step={fault.step}: this rank has no loader process; give "
            "a dataset of your own data.workers"
        )
    os.kill(loaders[0].pid, signal.SIGKILL)


KINDS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "crash": _crash,
    "abort": _abort,
    "exit": _leave,
    "hang": _hang,
    "stop": _stop,
    "slow": _slow,
    "raise": _raise,
    "memory": _memory,
    "disk": _disk,
    "term": _ask_to_stop,
    LOADER: _kill_a_loader,
    EXTRA: _call_alone,
}
ALL_KINDS = (*KINDS, PARENT, NODE, FLIP)
DRAWN = tuple(kind for kind in ALL_KINDS if kind not in ("hang", "stop", "term", EXTRA, FLIP, LOADER, NODE))
"""those that a seed draws: no waiting for a deadline, no orderly end, none from which there is no restart, and none that not
every job can have"""
