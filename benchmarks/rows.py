"""The rows of the table: the command of each, and what its output says."""

from __future__ import annotations

import json
import socket
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.setting import ROOT, Setting
from shoal.run import Run, read_json_lines

GIB = 1024**3


class Measured(NamedTuple):
    """What a row's processes measured; seconds and losses of every step, the warm-up too."""

    seconds: list[float]
    losses: list[float]
    allocated_gib: float | None
    """the most over the ranks"""
    reserved_gib: float | None
    window: Sequence[float]
    """when the counted steps began and ended, seconds since the epoch"""
    details: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Row(NamedTuple):
    """A line of the table before it is run: a plan of the product, or a peer's module."""

    name: str
    setting: str
    plan: tuple[str, ...] = ()
    peer: str = ""
    packages: tuple[str, ...] = ()
    needs_gpu: bool = False


def rows(ranks: int) -> list[Row]:
    """All rows for so many ranks, the most telling first, since the last may not be reached."""
    shards = [
        Row(
            f"shoal-zero{zero}",
            f"shard {ranks}, ZeRO-{zero}",
            plan=(f"plan.shard={ranks}", f"plan.zero={zero}"),
        )
        for zero in (3, 2, 1)
        if ranks > 1
    ]
    peers = [
        Row("torch-fsdp2", "by hand: FSDP2, compiled blocks, our model", peer="torch_fsdp2"),
        Row(
            "accelerate-fsdp2",
            "Accelerate FSDP2, compiled layers",
            peer="accelerate_fsdp2",
            packages=("transformers", "accelerate"),
            needs_gpu=True,
        ),
        Row("torch-ddp", "DDP, eager, autocast", peer="torch_ddp", packages=("transformers",)),
    ]
    replicate = Row("shoal-replicate", f"replicate {ranks}", plan=(f"plan.replicate={ranks}",))
    return [replicate, peers[0], *shards[:1], *peers[1:], *shards[1:]]


def obstacle(row: Row, on_gpu: bool) -> str | None:
    """Why a row cannot run here, or None."""
    missing = [package for package in row.packages if find_spec(package) is None]
    if missing:
        return f"skipped: {' and '.join(missing)} not installed"
    return "skipped: Accelerate refuses FSDP without a GPU" if row.needs_gpu and not on_gpu else None


def command_of(row: Row, setting: Setting, run_dir: Path) -> list[str]:
    """The command line that a user would type in the repository's folder."""
    job = str(setting.job_file.relative_to(ROOT))
    if row.plan:
        train = setting.job.train
        words = [
            f"train.steps={train.steps}",
            f"train.global_batch={train.global_batch}",
            f"run.dir={run_dir}",
        ]
        return [sys.executable, "-m", "shoal", "train", job, *row.plan, *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={setting.ranks}"]
    meeting = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    module = ["-m", f"benchmarks.peers.{row.peer}"]
    return [*torchrun, *meeting, *module, job, f"--steps={setting.job.train.steps}"]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def read_run(folder: Path, setting: Setting) -> Measured | None:
    """What a run directory of the product says; None unless every step is there."""
    run = Run(folder)
    records = [record for record in read_json_lines(run.metrics_file) if "loss" in record]
    if len(records) < setting.job.train.steps:
        return None
    seconds = [record["seconds"] for record in records]
    end = run.metrics_file.stat().st_mtime  # its last line is the last step's
    memory = max(
        record["memory"]
        for rank in range(setting.ranks)
        for record in read_json_lines(run.ranks / f"{rank}.jsonl")
    )
    return Measured(
        seconds=seconds,
        losses=[record["loss"] for record in records],
        allocated_gib=memory / GIB,
        reserved_gib=max((r["reserved"] / GIB for r in records if "reserved" in r), default=None),
        window=(end - sum(seconds[setting.warmup :]), end),
        details={"grad_norms": [record["grad_norm"] for record in records]},
    )


def read_peer(output: Path) -> Measured | None:
    """What a peer printed in its last line of JSON; None if there is none."""
    for line in reversed(output.read_text(errors="replace").splitlines()):
        if line.startswith('{"seconds"'):
            return Measured(**json.loads(line))
    return None


def figures(
    measured: Measured, setting: Setting, flops_per_token: float, peak: float | None
) -> dict[str, Any]:
    """The record of a row: medians over the steps after the warm-up, and everything they come from."""
    step_s = statistics.median(measured.seconds[setting.warmup :])
    rate = setting.tokens_per_rank / step_s
    return {
        "step_s": round(step_s, 6),
        "tokens_per_s_per_gpu": round(rate, 1),
        "mfu": round(rate * flops_per_token / peak, 4) if peak else None,
        "allocated_gib": _rounded(measured.allocated_gib),
        "reserved_gib": _rounded(measured.reserved_gib),
        "losses": measured.losses,
        "seconds": measured.seconds,
        **measured.details,
    }


def _rounded(gib: float | None) -> float | None:
    return None if gib is None else round(gib, 3)
