"""What all rows of a table train: read from one job file, so that peers and the product cannot drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.config import load
from shoal.job import Job
from shoal.models.presets import LlamaDims, num_parameters, resolve

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "benchmarks" / "jobs"


class Setting(NamedTuple):
    """A job on `ranks` ranks, each with one micro-batch a step where all of them are copies."""

    job: Job
    dims: LlamaDims
    data: Path | None
    """where text was prepared"""
    ranks: int
    steps: int
    """that are counted"""
    warmup: int
    """steps before them"""

    @property
    def parameters(self) -> int:
        return num_parameters(self.dims)

    @property
    def micro_batch(self) -> int:
        """Samples that a rank takes at a time."""
        return self.job.train.global_batch // self.ranks

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.job.train.global_batch * self.job.data.seq_len


def read_setting(job_file: Path, ranks: int, steps: int, warmup: int) -> Setting:
    """The setting of a job file.

    Raises:
        ValueError: the global batch is no multiple of the ranks.
    """
    settings = load(job_file)
    job = settings.job
    if job.train.global_batch % ranks:
        raise ValueError(
            f"train.global_batch = {job.train.global_batch}: expected a multiple of {ranks} ranks"
        )
    data = Path(settings.run.data) if settings.run.data else None
    return Setting(job, resolve(job.model, job.data.vocab), data, ranks, steps, warmup)
