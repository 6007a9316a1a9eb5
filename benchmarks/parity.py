"""Every axis and combination of axes against one device: the table of docs/parity.md.

    python benchmarks/parity.py --out DIR [--ranks 2,4,8] [--steps 20] [--precisions fp32,bf16] [--repeat N]

DIR/parity.json and DIR/parity.md are written. `--repeat N` instead compares a few plans under N seeds and counts how often
right code is accused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.config import Settings, load
from shoal.plan import AXES, Plan
from shoal.run import write_whole
from shoal.verify.run import Verdict, every_plan, verify

JOB = Path(__file__).resolve().parents[1] / "examples" / "quickstart.toml"
FEW = (Plan(tensor=2), Plan(context=2), Plan(pipeline=2), Plan(shard=2), Plan(replicate=2))
MOST_ZERO = 3


def main() -> int:
    """1 if any plan differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--repeat", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.repeat:
        return repeat(options.repeat, options.out)
    rows: list[dict[str, Any]] = []
    for precision in options.precisions.split(","):
        for ranks in map(int, options.ranks.split(",")):
            settings = load(JOB, [f"train.precision={precision}"])
            began = time.monotonic()
            plans = list(chosen(ranks))
            verdicts = verify(settings, plans, print, steps=options.steps)
            rows += [row(verdict, precision) for verdict in verdicts]
            print(
                f"{precision}, {ranks} ranks: {len(plans)} plans in {time.monotonic() - began:.0f} s",
                flush=True,
            )
            write_whole(options.out / "parity.json", json.dumps(rows, indent=1))
            write_whole(options.out / "parity.md", page(rows, options.steps))
    return int(not all(entry["same"] for entry in rows))


def chosen(ranks: int) -> list[Plan]:
    """All plans of 2 ranks; of more ranks those with the usual choices: each product of degrees once, and ZeRO in turn."""
    if ranks == 2:
        return list(every_plan(ranks, tied=True))
    found: dict[tuple[int, ...], Plan] = {}
    for plan in every_plan(ranks, tied=True):
        degrees = tuple(getattr(plan, axis) for axis in AXES)
        taken = found.setdefault(degrees, plan)
        if taken.zero == 1 and plan.zero == len(found) % MOST_ZERO + 1:
            found[degrees] = plan
    return list(found.values())


def row(verdict: Verdict, precision: str) -> dict[str, Any]:
    """A line of the table."""
    found = verdict.comparison
    line: dict[str, Any] = {"plan": verdict.plan.describe(), "precision": precision, "same": verdict.same}
    if found is None:
        return line | {"problem": verdict.problem}
    errors = {"loss": found.loss, "norm": found.norm, "gradient": found.gradient, "weights": found.weights}
    return line | errors | {"worst": found.worst, "first": found.first.describe() if found.first else None}


def page(rows: list[dict[str, Any]], steps: int) -> str:
    """The table as Markdown."""
    lines = [
        "# Parity",
        "",
        f"`python benchmarks/parity.py --out DIR --steps {steps}`: the largest relative errors of {steps} steps against one",
        "device in fp64, of a small Llama with grouped heads and tied ends. What is allowed is in [verify.md](verify.md); "
        f"{sum(entry['same'] for entry in rows)} of {len(rows)} are within it.",
        "",
        "| precision | plan | loss | gradient norm | worst gradient | weights | within |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for entry in rows:
        errors = " | ".join(
            f"{entry[name]:.0e}" if name in entry else "" for name in ("loss", "norm", "gradient", "weights")
        )
        lines.append(
            f"| {entry['precision']} | {entry['plan']} | {errors} | {'yes' if entry['same'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def repeat(times: int, out: Path) -> int:
    """Compare right code again and again, each time with other weights and data."""
    accused: list[str] = []
    count = 0
    for seed in range(times):
        for precision in ("fp32", "bf16"):
            settings: Settings = load(JOB, [f"train.seed={seed}", f"train.precision={precision}"])
            verdicts = verify(settings, FEW)
            count += len(verdicts)
            accused += [f"seed {seed}, {precision}: {verdict}" for verdict in verdicts if not verdict.same]
        print(f"seed {seed}: {len(accused)} of {count} accused", flush=True)
        write_whole(out / "repeat.json", json.dumps({"compared": count, "accused": accused}, indent=1))
    return int(bool(accused))


if __name__ == "__main__":
    sys.exit(main())
