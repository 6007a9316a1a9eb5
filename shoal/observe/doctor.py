"""`examine`: is this machine fit to train on? Findings in plain words, in seconds, changing nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from shoal.observe import host
from shoal.observe.health import conditions
from shoal.observe.machine import version_of
from shoal.observe.nvml import Reading, open_nvml

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 14)  # the newest that the tests have run on
LIVE_S = 12.0

Verdict = Literal["ok", "note", "problem"]

LEFTOVERS = {
    # variable: (a value that matters, or "" for any; what it does)
    "NCCL_P2P_DISABLE": ("1", "GPUs of this node talk through host memory instead of NVLink"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP instead of InfiniBand"),
    "NCCL_SHM_DISABLE": ("1", "processes of this node talk over TCP instead of shared memory"),
    "NCCL_NVLS_ENABLE": ("0", "NVSwitch does not help with all-reduce"),
    "NCCL_ALGO": ("", "NCCL does not choose its algorithm by measurement"),
    "NCCL_PROTO": ("", "NCCL does not choose its protocol by measurement"),
    "NCCL_IGNORE_NET_MISMATCH": ("1", "a network that differs between nodes hangs instead of failing"),
    "NCCL_DEBUG": ("TRACE", "every NCCL call is logged"),
    "TORCH_DISTRIBUTED_DEBUG": (
        "DETAIL",
        "every collective is preceded by a barrier and an all-gather: about 3 times slower",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "TORCH_SHOW_CPP_STACKTRACES": ("1", "an error can take 16 s to print"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every allocation goes to the driver"),
}


class Finding(NamedTuple):
    """One thing looked at. `meaning` says what the verdict means, and what to do about a problem."""

    name: str
    value: str
    verdict: Verdict
    meaning: str = ""


def examine(run_dir: str | Path = "runs") -> list[Finding]:
    """Look at this machine: software, devices, memory, network, limits, leftovers, and two live ranks.

    Example:
        >>> [finding.name for finding in examine()][:2]
        ['python', 'torch']
    """
    findings: list[Finding] = []
    for look in (_software, _backends, _devices, _health, _processor, _memory, _network, _limits, _compiler):
        findings += _careful(look)
    findings += _careful(lambda: _folders(Path(run_dir)))
    findings += _careful(lambda: leftovers(os.environ))
    findings += _careful(lambda: [live_ranks()])
    return findings


def _careful(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A look that itself fails is a finding, not the end of the examination."""
    try:
        return list(look())
    except Exception as error:
        name = getattr(look, "__name__", "look").strip("_<>")
        return [Finding(name, f"{type(error).__name__}: {error}", "problem", "this could not be examined")]


def _software() -> Iterator[Finding]:
    import torch

    version = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Finding(
        "python", version, "problem" if old else "ok", "Shoal needs Python 3.11 or newer" if old else ""
    )
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < OLDEST_TORCH:
        yield Finding("torch", torch.__version__, "problem", "too old: install torch 2.11 to 2.14")
    elif found > NEWEST_TORCH:
        meaning = "newer than any version that Shoal works with: install torch 2.11 to 2.14"
        yield Finding("torch", torch.__version__, "problem", meaning)
    else:
        yield Finding("torch", torch.__version__, "ok")


def _backends() -> Iterator[Finding]:
    import torch
    import torch.cuda.nccl
    import torch.distributed as dist

    yield Finding(
        "gloo", *_built(dist.is_gloo_available(), "", "CPU ranks cannot talk: this torch is not usable")
    )
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "built in"
        yield Finding("nccl", version, "ok", "must be the same version on all nodes")
    elif torch.cuda.is_available():
        yield Finding("nccl", "not built in", "problem", "GPUs cannot talk: install a CUDA build of torch")
    else:
        yield Finding("nccl", "not built in", "ok", "not needed without GPUs")
    for name, is_built in (("mpi", dist.is_mpi_available()), ("ucc", dist.is_ucc_available())):
        text = "built in" if is_built else "not built in"
        yield Finding(name, text, "ok", "Shoal does not need it; mpirun can start ranks all the same")


def _built(is_built: bool, good: str, bad: str) -> tuple[str, Verdict, str]:
    return ("built in", "ok", good) if is_built else ("not built in", "problem", bad)


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists()
        meaning = "a driver is here, but torch sees no GPU: a CPU build, or CUDA_VISIBLE_DEVICES empty?"
        yield Finding("devices", "CPU only", *(("problem", meaning) if driver else ("ok", "")))
        return
    driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    names = set()
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        names.add((gpu.name, gpu.total_memory))
        text = f"{gpu.name}, {total / host.GIB:.0f} GiB, {free / host.GIB:.0f} free, driver {driver or '?'}"
        busy = free < 0.9 * total
        meaning = "another process holds memory on it: see nvidia-smi" if busy else ""
        yield Finding(f"device {index}", text, "note" if busy else "ok", meaning)
    yield from _attention(
        [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    )
    if len(names) > 1:
        yield Finding(
            "devices", f"{len(names)} kinds", "note", "the slowest and smallest sets the pace for all"
        )


def _attention(capabilities: Iterable[tuple[int, int]]) -> Iterator[Finding]:
    """Whether a faster kernel could be had for these GPUs."""
    from shoal.parallel import flash

    if not any(flash.is_for(capability) for capability in capabilities):
        return
    if version := version_of(flash.PACKAGE):
        why = flash.why_not()
        yield Finding(
            "flash-attn-4", version, "note" if why else "ok", why and f"{why}: cuDNN's attention runs"
        )
    else:
        yield Finding("flash-attn-4", "none", "ok", "attention is faster with it: pip install 'shoal[flash]'")


def _health() -> Iterator[Finding]:
    nvml = open_nvml()
    if nvml is None:
        if Path("/proc/driver/nvidia/version").exists():
            meaning = "not watched while a run goes on: pip install 'shoal[gpu]' (nvidia-ml-py)"
            yield Finding("GPU health", "unknown", "note", meaning)
        return
    try:
        yield from gpu_findings([nvml.read(gpu) for gpu in range(nvml.count)])
    finally:
        nvml.close()


def gpu_findings(readings: Iterable[Reading]) -> Iterator[Finding]:
    """How each GPU is."""
    for now in readings:
        notes = list(conditions(now).values())
        errors = "unknown" if now.uncorrected is None else str(now.uncorrected)
        value = f"{now.temperature_c} C, {now.clock_mhz} of {now.most_mhz} MHz, uncorrected memory errors: {errors}"
        bad = any(note.leave for note in notes)
        said = [note.message for note in notes]
        if now.uncorrected:
            said.append(
                "had memory errors since its driver was loaded: reset it, and test it if they come again"
            )
        verdict = "problem" if bad else "note" if said else "ok"
        yield Finding(f"GPU {now.gpu} health", "lost" if now.gone else value, verdict, "; ".join(said))


def _processor() -> Iterator[Finding]:
    usable, present = host.cores(), os.cpu_count() or 1
    limited = usable < present
    meaning = f"the container or its affinity allows fewer than the host's {present}" if limited else ""
    yield Finding("cpu cores", f"{usable:g}", "note" if limited else "ok", meaning)


def _memory() -> Iterator[Finding]:
    memory = host.memory()
    if memory is not None:
        full = memory.used_bytes > 0.9 * memory.total_bytes
        meaning = "nearly full: the kernel may kill ranks" if full else ""
        yield Finding("memory in use", memory.describe(), "problem" if full else "ok", meaning)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < host.GIB
        meaning = (
            "too little for data loaders and NCCL: docker run --shm-size=8g, or an emptyDir of medium Memory"
        )
        yield Finding(
            "/dev/shm", f"{size / host.GIB:.2f} GiB", *(("problem", meaning) if small else ("ok", ""))
        )


def _network() -> Iterator[Finding]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname(), timeout=2):
            yield Finding("loopback", "a port opens", "ok")
    name = socket.gethostname()
    begin = time.monotonic()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield Finding("host name", name, "problem", f"does not resolve ({error}): add it to /etc/hosts")
        return
    took = time.monotonic() - begin
    if not any(_is_mine(address) for address in addresses):
        meaning = f"resolves to {', '.join(addresses)}, which is not this machine: correct /etc/hosts or DNS"
        yield Finding("host name", name, "problem", meaning)
    elif took > 1:
        yield Finding(
            "host name", name, "note", f"took {took:.1f} s to resolve: every start of a rank waits for it"
        )
    else:
        yield Finding("host name", f"{name} is {', '.join(addresses)}", "ok")


def _is_mine(address: str) -> bool:
    """An address that can be bound is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 0 <= soft < 4096
    meaning = f"many ranks and loaders open more: ulimit -n {hard if hard > 0 else 65536}" if low else ""
    yield Finding("open files", str(soft), "note" if low else "ok", meaning)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").exists() and locked != resource.RLIM_INFINITY:
        meaning = "InfiniBand needs it unlimited: docker run --ulimit memlock=-1"
        yield Finding("locked memory", f"{locked / host.GIB:.2f} GiB", "problem", meaning)


def _compiler() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or next(
        (name for name in ("g++", "clang++", "c++") if shutil.which(name)), ""
    )
    if compiler:
        yield Finding("C++ compiler", compiler, "ok")
    else:
        yield Finding(
            "C++ compiler",
            "none",
            "note",
            "torch.compile on the CPU needs one, such as g++",
        )
    if importlib.util.find_spec("triton") is None and Path("/proc/driver/nvidia/version").exists():
        yield Finding(
            "triton", "none", "problem", "torch.compile on GPUs needs it: install torch's own version"
        )


def _folders(run_dir: Path) -> Iterator[Finding]:
    existing = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    for name, folder in (("temporary folder", Path(tempfile.gettempdir())), ("run folder", existing)):
        free = shutil.disk_usage(folder).free / host.GIB
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            yield Finding(name, str(folder), "problem", f"cannot be written: {error}")
            continue
        meaning = "little room for checkpoints" if free < 5 else ""
        yield Finding(name, f"{folder}, {free:.0f} GiB free", "note" if meaning else "ok", meaning)


def leftovers(env: Mapping[str, str]) -> Iterator[Finding]:
    """Variables from a debugging session that slow training down or hide faults."""
    clean = True
    for name, (value, effect) in LEFTOVERS.items():
        if name in env and (not value or env[name].upper() == value):
            clean = False
            yield Finding(name, env[name], "note", f"{effect}; unset it unless you need it")
    if clean:
        yield Finding("debugging variables", "none set", "ok")


def live_ranks(limit_s: float = LIVE_S) -> Finding:
    """Have two processes all-reduce over Gloo and check the sum."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        command = [sys.executable, "-c", _RANK, folder]
        ranks = [
            subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
        ]
        try:
            errors = [
                rank.communicate(timeout=max(0.1, begin + limit_s - time.monotonic()))[1] for rank in ranks
            ]
        except subprocess.TimeoutExpired:
            meaning = (
                f"no sum within {limit_s:g} s: is a firewall on the loopback, or GLOO_SOCKET_IFNAME wrong?"
            )
            return Finding("two live ranks", "hang", "problem", meaning)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        last = (
            next(text for rank, text in zip(ranks, errors, strict=True) if rank.returncode)
            .strip()
            .splitlines()
        )
        return Finding("two live ranks", "fail", "problem", last[-1] if last else "they died without a word")
    return Finding("two live ranks", f"sum right, {time.monotonic() - begin:.1f} s with imports", "ok")


_RANK = """
import sys
import torch, torch.distributed as dist
from shoal.world import join_world
with join_world(init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), size=2, device="cpu",
deadline_s=10):
    value = torch.tensor([float(sys.argv[2]) + 1])
    dist.all_reduce(value)
    if value.item() != 3:
        sys.exit(f"1 + 2 gave {value.item()}")
"""


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
