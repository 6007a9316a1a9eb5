"""GPU health while a run goes on: heat, clocks, memory errors and Xids as alerts, and as a reason to leave a GPU out.

NVML is asked in a thread of its own: a driver that hangs holds up nobody else.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from shoal.observe.nvml import Nvml, Reading, open_nvml
from shoal.run import Run

EVERY_S = 10.0
AGAIN_S = 600.0  # until the same is said again of a GPU on which it comes and goes
LOOK_S = 3.0  # for a last look after a failure; a GPU off the bus can take its driver with it
BUSY, SLOW = (
    50,
    0.6,
)  # percent of the time, and part of the highest clock: an idle GPU is slow with good reason

# Bits of nvmlClocksEventReasons.
POWER_CAP, HARDWARE, SOFTWARE_HEAT, HARDWARE_HEAT, POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80

# Source: NVIDIA, "Xid errors". After those that leave, a GPU needs a reset, another link, or to be replaced.
LEAVING = {
    48: "an uncorrectable memory error",
    64: "a memory row could not be remapped",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "a memory error that it did not recover from",
}
OTHER = {
    13: "an exception in a kernel, usually the program's",
    31: "a page fault, usually the program's",
    43: "a channel stopped, usually after the program's error",
    63: "a memory row is to be remapped at the next reset",
    92: "many memory errors, all corrected",
    94: "a contained memory error, which ended the program that met it",
}
OF_A_KILL = 45  # a channel was cleaned up, as after each rank that is killed


class Note(NamedTuple):
    """Something about a GPU that a person should know."""

    gpu: int
    what: str
    message: str
    leave: bool = False
    """training on it again makes no sense"""


def conditions(now: Reading) -> dict[str, Note]:
    """What is not as it should be at a time, by a word for it."""
    gpu, found = now.gpu, {}

    def add(what: str, message: str, *, leave: bool = False) -> None:
        found[what] = Note(gpu, what, message, leave)

    if now.gone:
        add("gone", "does not answer any more: reset it, or restart the machine", leave=True)
        return found
    clock = f"{now.clock_mhz} of {now.most_mhz} MHz"
    if now.slowed_by & (SOFTWARE_HEAT | HARDWARE_HEAT):
        add(
            "heat", f"is slowed down since it is too hot: {now.temperature_c} C, {clock}; look at its cooling"
        )
    elif now.slowed_by & (HARDWARE | POWER_BRAKE):
        add("brake", f"is slowed down by its hardware: {clock}; look at its power supply and cooling")
    elif _is_slow(now):
        cap = " by its power cap" if now.slowed_by & POWER_CAP else ""
        add("slow", f"runs far below its clock{cap}: {clock}, {now.temperature_c} C")
    if now.remap_pending:
        add("remap", "has memory rows to remap, which a reset does: reset it when nothing runs")
    if now.remap_failed:
        add("remap failed", "has memory rows that could not be remapped: have it replaced", leave=True)
    return found


def changes(before: Reading | None, now: Reading) -> list[Note]:
    """What became of a GPU between two readings. What was so at the first one is no reason to leave it."""
    there = conditions(before) if before is not None else {}
    found = [note for what, note in conditions(now).items() if what not in there]
    if before is None:
        return [note._replace(leave=False) for note in found]
    if (more := (now.uncorrected or 0) - (before.uncorrected or 0)) > 0 and before.uncorrected is not None:
        found.append(Note(now.gpu, "ecc", f"had {more} memory errors that ECC could not correct", True))
    return found


def of_xid(gpu: int, xid: int) -> Note:
    """What an Xid says."""
    meaning = LEAVING.get(xid) or OTHER.get(xid)
    said = f"Xid {xid}" + (f": {meaning}" if meaning else ", see NVIDIA's list of Xids")
    return Note(gpu, f"xid {xid}", f"had {said}", xid in LEAVING)


class HealthWatch:
    """Looks at GPUs every so often, and tells what changed, each thing once in a while.

    Args:
        gpus: those that the run uses, in the order of its local ranks.
        tell: called with a rank and what there is to say of its GPU, first while this is still being built.
    """

    def __init__(
        self,
        nvml: Nvml,
        gpus: Sequence[int],
        tell: Callable[[int, Note], None],
        *,
        every_s: float = EVERY_S,
        first_rank: int = 0,
    ) -> None:
        self.first_rank = first_rank
        """the number of this machine's first rank, which is another one when machines come or go"""
        self._nvml, self._gpus, self._tell, self._every_s = nvml, gpus, tell, every_s
        self._before: dict[int, Reading] = {}
        self._told: dict[tuple[int, str], float] = {}
        self._leave: list[Note] = []
        self._turn = threading.Condition()
        self._asked, self._answered, self._over = 0, 0, False
        nvml.watch_xids(gpus)
        self._thread = threading.Thread(target=self._run, name="gpu health", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Read all GPUs, and tell."""
        notes = [of_xid(gpu, xid) for gpu, xid in self._nvml.xids() if gpu in self._gpus and xid != OF_A_KILL]
        for gpu in self._gpus:
            now = self._nvml.read(gpu)
            notes += changes(self._before.get(gpu), now)
            self._before[gpu] = now
        for note in notes:
            self._leave += [note] if note.leave else []
            key = (note.gpu, note.what)
            if time.monotonic() - self._told.get(key, -AGAIN_S) >= AGAIN_S:
                self._told[key] = time.monotonic()
                self._tell(self.first_rank + self._gpus.index(note.gpu), note)

    def leaving(self) -> list[str]:
        """Why some GPUs should be left out, after a last look; nothing if there are none."""
        with self._turn:
            self._asked += 1
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._answered == self._asked, LOOK_S)
        first = {note.gpu: note for note in reversed(self._leave)}
        rest = ",".join(str(gpu) for gpu in self._gpus if gpu not in first)
        without = (
            f"leave it out: CUDA_VISIBLE_DEVICES={rest}, with plan=auto" if rest else "use another machine"
        )
        return [f"GPU {gpu} {note.message}; {without}" for gpu, note in sorted(first.items())]

    def close(self) -> None:
        with self._turn:
            self._over = True
            self._turn.notify_all()
        self._thread.join(LOOK_S)
        if not self._thread.is_alive():
            self._nvml.close()

    def _run(self) -> None:
        while not self._over:
            asked = (
                self._asked
            )  # a look that has begun before it was asked for may not see what it is asked for
            with suppress(Exception):  # health is worth a look, and not a run
                self.look()
            with self._turn:
                self._answered = asked
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._over or self._asked > asked, self._every_s)  # noqa: B023


@contextmanager
def health_watched(
    run: Run, ranks: int, *, device: str, environment: Mapping[str, str], first_rank: int = 0
) -> Generator[HealthWatch | None]:
    """Watch the GPUs of this machine's `ranks` ranks, which begin with `first_rank`, and write alerts of them.

    Yields None where they have no GPUs, or NVML is not there.
    """
    nvml = open_nvml() if device != "cpu" else None
    gpus = visible_gpus(nvml, environment.get("CUDA_VISIBLE_DEVICES"))[:ranks] if nvml else []
    if nvml is None or not gpus:
        yield None
        return

    def tell(rank: int, note: Note) -> None:
        text = f"GPU {note.gpu} {note.message}"
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            run.event("alert", rank=rank, gpu=note.gpu, message=text)

    watch = HealthWatch(nvml, gpus, tell, first_rank=first_rank)
    try:
        yield watch
    finally:
        watch.close()


def visible_gpus(nvml: Nvml, visible: str | None) -> list[int]:
    """The GPUs that CUDA gives a process, in its order; none where the variable names parts of GPUs.

    Args:
        visible: CUDA_VISIBLE_DEVICES: numbers or UUIDs, of which those after one that is not there do not count.
    """
    if visible is None:
        return list(range(nvml.count))
    found: list[int] = []
    for word in map(str.strip, visible.split(",")):
        if word.isdigit() and int(word) < nvml.count:
            found.append(int(word))
        elif word.startswith("GPU-") and (
            same := [g for g in range(nvml.count) if nvml.uuid(g).startswith(word)]
        ):
            found.append(same[0])
        else:
            break
    return found


def _is_slow(now: Reading) -> bool:
    if now.clock_mhz is None or not now.most_mhz or (now.busy or 0) < BUSY:
        return False
    return now.clock_mhz < SLOW * now.most_mhz
