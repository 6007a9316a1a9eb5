"""What the rows ran on: versions, devices, and the GPUs' clocks, power and memory while they ran.

`python -m benchmarks.machine` prints the facts as JSON. The runner asks in a process of its own, so that it holds no
memory on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy")
FIELDS = ("timestamp", "index", "clocks.sm", "power.draw", "temperature.gpu", "memory.used")
EVERY_MS = 200


def facts() -> dict[str, Any]:
    """Devices and versions; `devices` is 0 without a GPU. Touches the GPUs."""
    import torch
    from torch.cuda.nccl import version as nccl_version

    from shoal.version import __version__
    from shoal.world import known_device

    count = torch.cuda.device_count()
    found: dict[str, Any] = {
        "devices": count,
        "device": platform.processor() or platform.machine(),
        "peak_flops": None,
        "python": platform.python_version(),
        "versions": {"shoal": __version__, **{name: version_of(name) for name in PACKAGES}},
    }
    if count:
        gpu = torch.cuda.get_device_properties(0)
        found["device"] = gpu.name
        found["peak_flops"] = known_device(gpu.name, gpu.total_memory).flops
        found["versions"] |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(str(part) for part in nccl_version()),
            "driver": _driver(),
        }
    return found


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def ask(env: dict[str, str], cwd: Path) -> dict[str, Any]:
    """The facts, from a process that has ended."""
    command = [sys.executable, "-m", "benchmarks.machine"]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
        )
    return None


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
    for line in path.read_text().splitlines() if path.exists() else []:
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


if __name__ == "__main__":
    print(json.dumps(facts()))
