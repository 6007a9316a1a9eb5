"""What each step measured: metrics.jsonl by rank 0, ranks/<rank>.jsonl by every rank, TensorBoard if asked."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.run import Run, append_json, read_json_lines, told_if_lost, write_whole

GIB = 1024**3


class Metrics(NamedTuple):
    """One step, as it is written; `unit` is what the loss is a mean of."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    units: int
    seconds: float
    mfu: float | None
    memory_bytes: int
    skipped: bool
    unit: str
    reserved_bytes: int | None = None
    """what the allocator of a GPU took from it at its peak"""

    @property
    def units_per_s(self) -> float:
        return self.units / self.seconds if self.seconds > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl; numbers that are not finite become null."""
        return {
            "step": self.step,
            "time": round(time.time(), 3),
            "loss": _finite(self.loss),
            "grad_norm": _finite(self.grad_norm),
            "lr": self.lr,
            self.unit: self.units,
            "seconds": round(self.seconds, 6),
            f"{self.unit}_per_s": round(self.units_per_s, 1),
            "mfu": None if self.mfu is None else round(self.mfu, 4),
            "memory": self.memory_bytes,
            **({"reserved": self.reserved_bytes} if self.reserved_bytes is not None else {}),
            **({"skipped": True} if self.skipped else {}),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class MetricsWriter:
    """Writes a run's metrics; made on every rank."""

    def __init__(self, run: Run, rank: int, *, tensorboard: bool) -> None:
        self._run, self._rank = run, rank
        self._own = run.ranks / f"{rank}.jsonl"
        self._tensorboard = _tensorboard(run.path) if tensorboard and rank == 0 else None

    def write(self, metrics: Metrics) -> None:
        own = {"step": metrics.step, "seconds": round(metrics.seconds, 6), "memory": metrics.memory_bytes}
        with told_if_lost():
            append_json(self._own, own)
        if self._rank == 0:
            with told_if_lost():
                append_json(self._run.metrics_file, metrics.record())
            self._scalars(metrics.step, metrics.record())

    def write_eval(self, step: int, loss: float, weight: int, seconds: float) -> None:
        """A line of an evaluation after `step` optimizer steps."""
        if self._rank == 0:
            record = {
                "step": step,
                "eval_loss": _finite(loss),
                "eval_weight": weight,
                "seconds": round(seconds, 3),
            }
            with told_if_lost():
                append_json(self._run.metrics_file, record)
            self._scalars(step, {"eval_loss": loss})

    def _scalars(self, step: int, record: dict[str, Any]) -> None:
        if self._tensorboard is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def forget_after(run: Run, rank: int, step: int) -> None:
    """Drop a rank's lines of steps that a resumed run will take again."""
    for path in (run.ranks / f"{rank}.jsonl", *([run.metrics_file] if rank == 0 else [])):
        if path.exists():
            kept = [record for record in read_json_lines(path) if record["step"] <= step]
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def memory_bytes(device: torch.device, shared: int = 0) -> int:
    """The most memory this rank has held: the allocator's peak on a GPU, the peak of resident memory on a CPU.

    Args:
        shared: bytes of a GPU beside that, which other ranks read.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + shared
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reserved_bytes(device: torch.device, shared: int = 0) -> int | None:
    """The most that the caching allocator of a GPU held, and what is `shared` beside; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) + shared if device.type == "cuda" else None


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "run.tensorboard = true needs TensorBoard: pip install 'shoal[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"))
