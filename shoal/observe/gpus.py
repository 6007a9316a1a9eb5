"""Clocks, power, temperature and memory of this machine's GPUs while something runs, as nvidia-smi tells them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from shoal.run import text_of

FIELDS = ("timestamp", "index", "clocks.sm", "power.draw", "temperature.gpu", "memory.used")
EVERY_MS = 200


class Sample(NamedTuple):
    """One line of nvidia-smi: one GPU at one time."""

    time: float
    """seconds since the epoch"""
    gpu: int
    clock_mhz: float
    power_w: float
    temperature_c: float
    memory_mib: float


@contextmanager
def sampled(path: Path) -> Generator[None]:
    """Write a sample of every GPU to `path` each EVERY_MS milliseconds; nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    query = f"--query-gpu={','.join(FIELDS)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
    with path.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file; lines that are cut short or hold no number are left out."""
    found = []
    for line in text_of(path).splitlines():
        time, *numbers = (part.strip() for part in line.split(","))
        with suppress(ValueError, TypeError):
            when = datetime.strptime(time, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            gpu, *rest = (float(number) for number in numbers)
            found.append(Sample(when, int(gpu), *rest))
    return found


def summary(samples: list[Sample], window: Sequence[float] | None) -> dict[str, Any] | None:
    """Medians of clock, power and temperature over the window of counted steps; the most memory at any time."""
    if not samples:
        return None
    inside = [sample for sample in samples if window and window[0] <= sample.time <= window[1]]
    found: dict[str, Any] = {
        "samples": len(inside),
        "memory_gib": round(max(sample.memory_mib for sample in samples) / 1024, 2),
    }
    if inside:
        found["clock_mhz"] = statistics.median(sample.clock_mhz for sample in inside)
        found["power_w"] = statistics.median(sample.power_w for sample in inside)
        found["temperature_c"] = max(sample.temperature_c for sample in inside)
    return found
