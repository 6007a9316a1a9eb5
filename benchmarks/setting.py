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
    """A job on `ranks` ranks, each with one micro-batch a step."""

    job_file: Path
    job: Job
    dims: LlamaDims
    ranks: int
    micro_batch: int
    warmup: int
    """first steps that are run and not counted"""

    @property
    def parameters(self) -> int:
        return num_parameters(self.dims)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens a rank takes in a step."""
        return self.micro_batch * self.job.data.seq_len


def read_setting(job_file: Path, ranks: int, steps: int) -> Setting:
    """The setting of a job file whose plan says `micro_batch`; a quarter of the steps, 5 at most, are warm-up.

    Raises:
        ValueError: the file's plan says no micro-batch, or there are fewer than 2 steps.
    """
    if steps < 2:
        raise ValueError(f"steps = {steps}: at least 2, the first of which is warm-up")
    micro = (plan := load(job_file).plan) and plan.micro_batch
    if not micro:
        raise ValueError(f"{job_file}: plan.micro_batch is needed, the samples a rank takes in a step")
    words = [f"train.steps={steps}", f"train.global_batch={micro * ranks}"]
    job = load(job_file, words).job
    warmup = min(5, max(1, steps // 4))
    return Setting(job_file, job, resolve(job.model, job.data.vocab), ranks, micro, warmup)
