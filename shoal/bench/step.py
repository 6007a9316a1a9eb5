"""`bench_step`: start the ranks of a job, let them take steps, and make one record of what all of them measured."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from shoal.bench.ask import TARGET, Ask, read_answers, write_ask
from shoal.bench.breakdown import Breakdown, Kernel, over_ranks
from shoal.bench.figures import Amount, Record, figures, gib
from shoal.config import Settings
from shoal.launch.local import launch
from shoal.observe.gpus import read_samples, sampled, summary
from shoal.run import Run


class BenchError(RuntimeError):
    """A rank failed; the message is the launcher's report."""


def make_folder(folder: Path) -> None:
    """A folder for results.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out: {folder} cannot be made: {error.strerror}; give a folder that can be written"
        ) from error


def bench_step(
    settings: Settings, ask: Ask, folder: Path, *, device: str = "auto", quiet: bool = False
) -> Record:
    """Time the steps of a job whose plan and data are chosen.

    Args:
        folder: where samples of the GPUs (and what `ask` wants) are written.
        quiet: a failure is not told on stderr, but by the error alone.

    Raises:
        BenchError: a rank failed.
    """
    if settings.plan is None:
        raise ValueError("settings.plan is not chosen yet")
    make_folder(folder)
    ranks, samples = settings.plan.world_size, folder / "gpus.csv"
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as place:
        run = Run(Path(place))
        write_ask(run, ask)
        policy = settings.run.model_copy(update={"dir": place, "resume": False, "tensorboard": False})
        settings = settings.model_copy(update={"run": policy})
        with sampled(samples):
            outcome = launch(settings, ranks, device=device, target=TARGET, quiet=quiet)
        if outcome.state != "ok":
            raise BenchError(outcome.report or "stopped before its last step")
        answers = read_answers(run, ranks)
    record = _record(answers) | {"job": settings.job.model_dump(mode="json")}
    record["gpu"] = summary(read_samples(samples), record["window"])
    return record


def _record(answers: list[dict[str, Any]]) -> Record:
    """Times are those of the slowest rank in each step, memory is the most over ranks; losses are equal on all."""
    first = answers[0]
    about = first["about"]
    amount = Amount(
        about["units_per_step"], about["unit"], about["ranks"], about["flops_per_step"], about["peak_flops"]
    )
    record = about | figures(
        [max(step) for step in zip(*(a["seconds"] for a in answers), strict=True)], amount
    )
    record |= {key: first[key] for key in ("warmup", "window", "losses", "grad_norms", "setup_s")}
    waits = [max(step) for step in zip(*(a["waits"] for a in answers), strict=True)]
    record["data_wait_s"] = round(statistics.median(waits), 6)
    for kind in ("allocated", "reserved"):
        held = [a["memory"][kind] for a in answers if a["memory"][kind] is not None]
        record[f"{kind}_gib"] = gib(max(held, default=None))
    if "profile" in first:
        record["profile"] = _profile([_breakdown(answer["profile"]) for answer in answers])
    return record


def _profile(ranks: list[Breakdown]) -> Record:
    return {
        "lines": [line._asdict() for line in over_ranks(ranks)],
        "longest": [kernel._asdict() for kernel in ranks[0].longest],
        "ranks": [rank._asdict() | {"longest": [k._asdict() for k in rank.longest]} for rank in ranks],
    }


def _breakdown(table: dict[str, Any]) -> Breakdown:
    """Back from JSON."""
    return Breakdown(**table | {"longest": [Kernel(*kernel) for kernel in table["longest"]]})
