"""Other estimators of memory beside `shoal plan`, on the same runs on GPUs: what each says of the peak, and how far off it is.

    python benchmarks/estimators.py [--out FILE] [--calculon CHECKOUT]

Each is its published formula, written anew, on the rows that it can be asked about; no GPU and none of the packages is needed.
Calculon is asked itself: see `estimators_calculon.py`.
What `shoal plan` says of the rows is taken from results/reality.json.

Sources: accelerate 1.x, commands/estimate.py (`accelerate estimate-memory`); DeepSpeed, runtime/zero/stage_1_and_2.py and
stage3.py (`estimate_zero2_model_states_mem_needs`, `estimate_zero3_model_states_mem_needs`); Megatron-LM,
training/theoretical_memory_usage.py (`report_theoretical_memory`). DeepSpeed's are of model states alone, as their names say, and
accelerate's knows no plan: both are asked the question that people ask them, whether a run fits.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.earlier import measured
from benchmarks.estimators_calculon import Calculon
from benchmarks.reality import HERE, Real
from shoal.config import Settings, apply_overrides, load, parse
from shoal.models.presets import LlamaDims, num_parameters, resolve
from shoal.plan import Plan
from shoal.run import write_whole

GIB = 1024**3
OURS = "shoal plan"


class Asked(NamedTuple):
    """A run, as formulas want it."""

    dims: LlamaDims
    plan: Plan
    devices: int
    micro_batch: int
    micro_batches: int
    length: int

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return num_parameters(self.dims)


def accelerate(asked: Asked) -> float | None:
    """Weights and gradients in fp32 and bf16, two moments in fp32: the largest of its parts, for a whole model on one device."""
    fp32 = 4 * asked.parameters
    return float(max(fp32, fp32 + fp32 // 2, 2 * fp32))


def deepspeed(asked: Asked) -> float | None:
    """Model states of ZeRO-2 and ZeRO-3 without offload; of other plans it says nothing."""
    plan = asked.plan
    if plan.offload or plan.shard != asked.devices or plan.zero_stage not in (2, 3):
        return None
    if plan.zero_stage == 2:
        return 4 * asked.parameters + int(16 * asked.parameters / asked.devices)
    dims = asked.dims
    largest = max(dims.vocab * dims.dim, dims.ffn * dims.dim)  # of one module's own parameters
    return 4 * largest + int(18 * asked.parameters / asked.devices)


def megatron(asked: Asked) -> float | None:
    """Of plans that Megatron's report knows: copies or ZeRO-1 (its distributed optimizer), tensor, pipeline."""
    plan = asked.plan
    known = plan.context == 1 and plan.expert == 1 and not plan.offload and plan.recompute == "none"
    if not known or plan.zero_stage > 1 or plan.schedule not in ("1f1b", "interleaved_1f1b"):
        return None
    return _megatron_states(asked) + _megatron_activations(asked)


def _megatron_states(asked: Asked) -> float:
    dims, plan = asked.dims, asked.plan
    attention = 2 * dims.dim**2 * (1 + dims.kv_heads / dims.heads)
    layer = 2 * dims.dim * (dims.ffn * 1.5 + 1) + attention
    embedding = dims.dim * dims.vocab
    shard = (layer * dims.layers + dims.dim) / plan.pipeline + embedding
    if not dims.tied and plan.pipeline == 1:
        shard += embedding
    data = plan.replicate * plan.shard
    each = 6 + 12 / data if plan.zero_stage == 1 else 18
    return shard / plan.tensor * each


def _megatron_activations(asked: Asked) -> float:
    """With sequence parallelism (tensor) the formula of Korthikanti et al. 2022, without it the report's other one."""
    dims, plan = asked.dims, asked.plan
    cut, stages = plan.tensor, plan.pipeline
    tokens = asked.length * asked.micro_batch
    layer = tokens * dims.dim * (18 + 4 * dims.ffn / dims.dim if cut > 1 else 10 + 24 / cut)
    total = layer * dims.layers + (8 + dims.dim) * tokens * stages
    if plan.schedule == "interleaved_1f1b" and stages > 1:
        total *= 1 + (stages - 1) / (stages * plan.stages_per_rank)
    elif stages > 1:
        total *= min(1.0, asked.micro_batches / stages)
    if cut > 1:
        total += tokens * dims.dim * 4 * (1 + dims.vocab / dims.dim) if stages == 1 else 0
        return total / cut
    total += 2 * tokens * (dims.vocab + dims.dim) if stages == 1 else 0
    return 1.05 * total


CALCULON = "Calculon"
ESTIMATORS: dict[str, Callable[[Asked], float | None]] = {
    "accelerate estimate-memory": accelerate,
    "DeepSpeed estimate_zero": deepspeed,
    "Megatron theoretical memory": megatron,
}
NAMES = (OURS, *ESTIMATORS, CALCULON)


def main() -> int:
    """Compare all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--calculon", type=Path, default=None, help="a checkout of it, which needs pandas")
    options = parser.parse_args()
    calculon = None if options.calculon is None else Calculon(options.calculon)
    said = json.loads((HERE / "results" / "reality.json").read_text())["rows"]
    ours = {(row["file"], row["name"], row["words"]): row for row in said if "allocated_gib" in row}
    found = [compare(real, ours, calculon) for real in measured()]
    command = "python benchmarks/estimators.py" + (" --calculon CHECKOUT" if calculon else "")
    kept = {"command": command, "rows": found, "summary": summary(found), "calculon_times": times(found)}
    if options.out:
        write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    print(table(kept))
    return 0


def compare(
    real: Real, ours: dict[tuple[str, str, str], dict[str, Any]], calculon: Calculon | None = None
) -> dict[str, Any]:
    """A run's measured peak of allocated memory, and what each says of it; left out where it cannot be asked."""
    row = ours.get((real.file, real.name, shlex.join(real.words)))
    estimates = {} if row is None else {OURS: row["allocated_gib"]["predicted"]}
    asked = asked_of(real)
    if asked is not None:
        for name, estimator in ESTIMATORS.items():
            bytes_ = estimator(asked)
            if bytes_ is not None:
                estimates[name] = bytes_ / GIB
    told = None
    if asked is not None and calculon is not None:
        told = calculon.ask(asked.dims, asked.plan, asked.length, asked.micro_batch, asked.micro_batches)
    if told is not None:
        estimates[CALCULON] = told[0] / GIB
    step = {} if told is None or "h100" not in real.on else {"measured": real.step_s, "calculon": told[1]}
    if step and row is not None:
        step["shoal plan"] = row["step_s"]["predicted"]
    return {
        "file": real.file,
        "name": real.name,
        "on": real.on,
        "measured_gib": real.allocated_gib,
        "said": {
            name: {"gib": round(gib, 2), "error": round(gib / real.allocated_gib - 1, 4)}
            for name, gib in estimates.items()
        },
        **({"step_s": step} if step else {}),
    }


def asked_of(real: Real) -> Asked | None:
    """None for a mixture of experts: all of these price it as a dense model, or not at all."""
    settings = _settings(real)
    if settings.model.family != "llama" or settings.plan is None:
        return None
    plan = settings.plan
    count, size = plan.micro_batches(settings.train.global_batch)
    dims = resolve(settings.model, settings.data.vocab)
    return Asked(dims, plan, plan.world_size, size, count, settings.data.seq_len)


def _settings(real: Real) -> Settings:
    if isinstance(real.job, str):
        return load(HERE / "jobs" / f"{real.job}.toml", real.words)
    return parse(apply_overrides(real.job, real.words), where=real.name)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors without their signs: of all rows that each was asked about, and ours on the same rows."""
    found = {}
    for name in NAMES:
        on = [row["said"] for row in rows if name in row["said"]]
        if not on:
            continue
        errors = [abs(said[name]["error"]) for said in on]
        beside = [abs(said[OURS]["error"]) for said in on if OURS in said]
        found[name] = {
            "rows": len(on),
            "median": round(statistics.median(errors), 4),
            "mean": round(statistics.mean(errors), 4),
            "worst": round(max(errors), 4),
            "ours_mean": round(statistics.mean(beside), 4) if beside else math.nan,
        }
    return found


def times(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of a step's time, without their signs, of the rows on H100s that Calculon was asked about."""
    steps = [row["step_s"] for row in rows if "step_s" in row and "shoal plan" in row["step_s"]]
    return {
        name: round(statistics.mean(abs(step[name] / step["measured"] - 1) for step in steps), 4)
        for name in ("calculon", "shoal plan")
        if steps
    } | {"rows": len(steps)}


def table(kept: dict[str, Any]) -> str:
    """The summary, and all rows, as Markdown."""
    lines = [
        "| | rows | half within | mean | worst | `shoal plan` on these rows, mean |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, each in kept["summary"].items():
        cells = [f"{each[key]:.1%}" for key in ("median", "mean", "worst", "ours_mean")]
        lines.append(f"| {name} | {each['rows']} | {' | '.join(cells)} |")
    lines += ["", "| run | on | measured GiB | " + " | ".join(NAMES) + " |"]
    lines.append("| --- | --- | ---: |" + " ---: |" * len(NAMES))
    for row in kept["rows"]:
        cells = [
            f"{row['said'][name]['gib']:.1f} ({row['said'][name]['error']:+.0%})"
            if name in row["said"]
            else ""
            for name in NAMES
        ]
        lines.append(f"| {row['name']} | {row['on']} | {row['measured_gib']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
