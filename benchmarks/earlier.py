"""Runs on GPUs of earlier versions, from result files of this folder.

What `shoal plan` said of each in its day is in results/reality.json; `estimators.py` asks others about them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.axes import SIZES
from benchmarks.offload import KINDS as OFFLOADED
from benchmarks.offload import MICRO_BATCH
from benchmarks.offload import SIZES as OF_OFFLOAD
from benchmarks.reality import HERE, Real, on_text

AXES = ("axes_4xh100", "axes_4xh200", "axes_2xh200", "float8_2xh200")
RECORDED = "plan.compile=true plan.cuda_graphs=true"
STEPS = {
    "against_8b_2xh200": "llama_8b plan.shard=2 plan.zero=2 train.global_batch=2",
    "against_1b_2xh200": "llama_1b plan.shard=2 plan.zero=2 train.global_batch=8",
    "against_433m_2xh200": "llama_433m plan.replicate=2 train.global_batch=2 plan.compile=true",
    "against_8b_4xh200": "llama_8b plan.shard=4 plan.zero=2",
    "against_1b_4xh200": "llama_1b plan.shard=4 plan.zero=2",
    "step_150m_4xh200": "llama_150m plan.replicate=4 plan.compile=model",
    "against_150m_1xh200": "llama_150m plan.replicate=1 train.global_batch=4 plan.compile=model",
    "against_433m_1xh200": "llama_433m plan.replicate=1 train.global_batch=1 plan.compile=model",
    "against_1b_1xh200": "llama_1b plan.replicate=1 train.global_batch=4 plan.micro_batch=4 plan.compile=true",
    "float8_tiles_1xh200": "llama_8b model.layers=8 plan.replicate=1 train.global_batch=1 plan.compile=true",
}
"""the words that rows of `shoal bench step` begin with; a row's own follow its name"""
PARTS = {
    ("recorded_1xh200", "433m"): "llama_433m plan.replicate=1 train.global_batch=1 plan.compile=model",
    ("recorded_1xh200", "1.24b"): "llama_1b plan.replicate=1 train.global_batch=4 plan.compile=true",
    (
        "recorded_1xh200",
        "1.24b float8",
    ): f"llama_1b plan.replicate=1 train.global_batch=4 train.precision=float8 {RECORDED}",
    ("recorded_1xh200", "150m"): f"llama_150m plan.replicate=1 train.global_batch=4 {RECORDED}",
    ("recorded_2xh200", "433m alone"): f"llama_433m plan.shard=2 plan.zero=2 train.global_batch=2 {RECORDED}",
    ("recorded_2xh200", "1.24b"): f"llama_1b plan.shard=2 plan.zero=2 train.global_batch=8 {RECORDED}",
    ("ahead_2xh200", "8b"): "llama_8b plan.shard=2 plan.zero=2 train.global_batch=2",
    ("ahead_2xh200", "1.24b"): "llama_1b plan.shard=2 plan.zero=2 train.global_batch=8",
}
"""the same for files that have rows, or one, of several sizes"""
SMALL = {
    "z2": "llama_433m plan.shard=2 plan.zero=2 train.global_batch=2",
    "z2_1b": "llama_1b plan.shard=2 plan.zero=2 train.global_batch=8",
    "blocks": "llama_433m plan.replicate=2 train.global_batch=2 plan.compile=true",
}
ONE_B = {
    "shoal-replicate": "plan.replicate=4 plan.compile=true",
    "shoal-zero1": "plan.shard=4 plan.zero=1",
    "shoal-zero2": "plan.shard=4 plan.zero=2",
    "shoal-zero3": "plan.shard=4 plan.zero=3",
}


def measured() -> Iterator[Real]:
    """All rows of Shoal's own with figures."""
    for file in AXES:
        kept = _read(file)
        on = on_text(kept["machine"])
        for row in kept["rows"]:
            if "allocated_gib" in row:
                size = {key: value for key, value in SIZES["8b"].items() if key != "moe"}
                size["model"] = SIZES["8b"]["moe" if row["name"].startswith("moe") else "model"]
                yield _real(file, row["name"], size, _words(row["plan"]), on, row)
    for file, first in STEPS.items():
        for row in _read(file)["rows"]:
            if row["name"].startswith("shoal"):
                job, *words = first.split()
                own = row["name"].split()[1:]
                yield _real(file, row["name"], job, [*words, *own], on_text(row["machine"]), row)
    for (file, part), first in PARTS.items():
        found = _read(file)[part]
        for row in found if isinstance(found, list) else [found]:
            own = row.get("name", "shoal").split()
            if own[0] == "shoal":
                job, *words = first.split()
                yield _real(
                    file, " ".join([part, *own[1:]]), job, [*words, *own[1:]], on_text(row["machine"]), row
                )
    for name, row in _read("small_2xh200")["rows"].items():
        job, *words = SMALL[name].split()
        yield _real("small_2xh200", name, job, words, on_text(row["machine"]), row)
    kept = _read("offload_2xh200")
    for row in kept["rows"]:
        if "allocated_gib" in row:
            words = (
                f"plan.shard=2 plan.micro_batch={MICRO_BATCH} train.global_batch={2 * MICRO_BATCH}".split()
            )
            words.append(f"plan.offload={','.join(OFFLOADED.get(row['name'], [])) or 'none'}")
            name = f"1b, offload {row['name']}"
            yield _real(
                "offload_2xh200", name, OF_OFFLOAD[kept["size"]], words, on_text(kept["machine"]), row
            )
    kept = _read("step_1b_4xh100")
    for row in kept["rows"]:
        if row["name"] in ONE_B:
            yield _real(
                "step_1b_4xh100", row["name"], _job_of(kept), ONE_B[row["name"]].split(), "4 h100", row
            )


def _read(file: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{file}.json").read_text())


def _words(text: str) -> list[str]:
    """Words of a plan, of which lists may have spaces inside."""
    words: list[str] = []
    for word in text.split(" "):
        if "=" in word:
            words.append(word)
        else:
            words[-1] += f" {word}"
    return words


def _job_of(kept: dict[str, Any]) -> dict[str, Any]:
    """The job that a result file holds, without what is left out."""
    setting = kept["setting"]
    job = {
        table: {key: value for key, value in values.items() if value is not None}
        for table, values in setting["job"].items()
        if isinstance(values, dict)
    }
    return job | {"plan": {"micro_batch": setting["micro_batch"]}}


def _real(
    file: str, name: str, job: dict[str, Any] | str, words: list[str], on: str, row: dict[str, Any]
) -> Real:
    step_s = row.get("step_s_without_compiling", row["step_s"])
    words = ["plan.cuda_graphs=false", *words]  # as all were launched, unless a row says otherwise
    return Real(file, name, job, words, on, step_s, row["allocated_gib"], row["reserved_gib"])
