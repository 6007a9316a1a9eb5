"""What this host and its container have: memory in use, cores, and kills for want of memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

GIB = 1024**3


class Memory(NamedTuple):
    """Bytes in use and in all, of the container if it has a limit, else of the host."""

    used_bytes: int
    total_bytes: int

    def describe(self) -> str:
        return f"{self.used_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB"


def memory() -> Memory | None:
    """Memory in use now; None where the system does not say."""
    return _cgroup_memory() or _host_memory()


def cores() -> float:
    """CPU cores that this process may use: its affinity, and the container's quota (can be a fraction)."""
    allowed = (
        float(len(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else float(os.cpu_count() or 1)
    )
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        return min(allowed, int(quota[0]) / int(quota[1]))
    return allowed


def oom_kills() -> int:
    """Processes that the kernel's out-of-memory killer has killed on this host since it started."""
    for line in _read("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def process_state(pid: int) -> str:
    """The kernel's letter: Z has ended, and whoever began it has not asked how; T is stopped; nothing if there is none."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1]


def _cgroup_memory() -> Memory | None:
    """cgroup v2 or v1; page cache that can be dropped does not count as used."""
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        total, now = _read(f"{folder}/{limit}").strip(), _read(f"{folder}/{used}").strip()
        if total.isdigit() and now.isdigit() and int(total) < 1 << 60:  # v1 says 2^63 for no limit
            stat = dict(
                line.split() for line in _read(f"{folder}/memory.stat").splitlines() if line.count(" ") == 1
            )
            return Memory(int(now) - int(stat.get(cache, 0)), int(total))
    return None


def _host_memory() -> Memory | None:
    fields = dict(line.split(":") for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return None
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return Memory(total - available, total)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
