"""What this machine is: devices and versions of what computes on them.

`python -m shoal.observe.machine` prints it as JSON: a program that is to hold no memory on a GPU asks in that way.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from contextlib import suppress
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy", "flash-attn-4")


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


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
        )
    return None


if __name__ == "__main__":
    print(json.dumps(facts()))
