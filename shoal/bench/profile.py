"""One step under torch's profiler: the Chrome trace as a file, and what the step is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from shoal.bench.breakdown import STEP, Breakdown, break_down
from shoal.bench.trace import OURS, read_trace
from shoal.data.cut import StepBatch
from shoal.train.result import StepResult
from shoal.train.step import Step
from shoal.world import World

UNRECORDED = 1  # the profiler's own start takes time in the first step that it sees
RECORDED = 2  # the one that is analysed begins as in a run: with the device still at the one before


class Phases:
    """Passes on the phases of steps and, while a step is profiled, puts them into the trace."""

    def __init__(self, pass_on: Callable[[str, int], None]) -> None:
        self._pass_on = pass_on
        self._recording = False
        self._open: record_function | None = None

    def enter(self, phase: str, step: int) -> None:
        """As `Step` tells its phases."""
        self._pass_on(phase, step)
        if self._recording:
            self.close()
            self._open = record_function(f"{OURS}{phase}")
            self._open.__enter__()

    def close(self) -> None:
        """End the phase that is open."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def record(self, recording: bool) -> None:
        """Begin or stop to put phases into the trace."""
        self.close()
        self._recording = recording


def profile_step(
    step: Step, next_batch: Callable[[], StepBatch], phases: Phases, world: World, folder: Path
) -> Breakdown:
    """Take steps under the profiler, write the trace of the last ones to `folder` and analyse the last. Collective."""
    path = trace_file(folder, world.rank)
    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))

    course = schedule(wait=0, warmup=UNRECORDED, active=RECORDED, repeat=1)
    phases.record(True)
    unread: StepResult | None = None
    with profile(activities=activities, schedule=course, on_trace_ready=write) as profiler:
        for _ in range(UNRECORDED + RECORDED):
            batch = next_batch()
            with record_function(STEP):
                result = step(batch)
                phases.close()
            if unread is not None:
                _ = unread.numbers  # one step late, as a run reads them
            unread = result
            profiler.step()
    phases.record(False)
    return break_down(read_trace(path))


def trace_file(folder: Path, rank: int) -> Path:
    """Where the trace of a rank is."""
    return folder / f"trace-rank{rank}.json.gz"
