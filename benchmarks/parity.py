"""Every axis and combination of axes against one device, dense and with experts: the table of docs/parity.md.

    python benchmarks/parity.py --out DIR [--ranks 2,4,8] [--steps 20] [--precisions fp32,bf16] [--models dense,moe]
    python benchmarks/parity.py --out DIR --repeat 50

DIR/parity.json and DIR/parity.md are written. `--repeat N` instead compares a few plans under N seeds and counts how often
right code is accused: DIR/repeat.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from itertools import cycle, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.config import Settings, load
from shoal.plan import AXES, Plan
from shoal.run import write_whole
from shoal.verify.compare import SLACK
from shoal.verify.run import Verdict, ends_and_experts, every_plan, verify, verify_each

JOB = Path(__file__).resolve().parents[1] / "examples" / "quickstart.toml"
MODELS = {"dense": (), "moe": ("model.family=moe", "model.preset=8x5m")}
FEW: dict[str, tuple[Plan, ...]] = {
    "dense": (Plan(tensor=2), Plan(context=2), Plan(pipeline=2), Plan(shard=2), Plan(replicate=2)),
    "moe": (Plan(shard=2, expert=2), Plan(tensor=2, expert=2), Plan(replicate=2)),
}
SAVING: tuple[dict[str, Any], ...] = (
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_keep": ("every_second_matmul",), "recompute_every": 2},
    {"offload": ("optimizer",)},
    {"offload": ("activations",)},
    {"offload": ("parameters", "optimizer", "activations"), "recompute": "full"},
)
"""What is traded for memory, tried with the axes in turn."""
MOST = 18  # of each size above 2
AT_ONCE = 3  # seeds that share a launch


def main() -> int:
    """1 if any plan differs."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.repeat:
        seeds = range(options.first, options.first + options.repeat)
        few = {model: FEW[model] for model in options.models.split(",")}
        return repeat(seeds, few, options.precisions.split(","), options.out)
    rows: list[dict[str, Any]] = []
    for model, precision, ranks in product(
        options.models.split(","), options.precisions.split(","), map(int, options.ranks.split(","))
    ):
        settings = load(JOB, [*MODELS[model], f"train.precision={precision}"])
        began = time.monotonic()
        plans = chosen(settings, ranks)
        verdicts = verify(settings, plans, steps=options.steps, sharp=False)  # fp32 has rows of its own
        rows += [row(verdict, model, precision) for verdict in verdicts]
        took = time.monotonic() - began
        accused = sum(not verdict.same for verdict in verdicts)
        print(f"{model}, {precision}, {ranks} ranks: {len(plans)} plans in {took:.0f} s, {accused} differ")
        sys.stdout.flush()
        write_whole(options.out / "parity.json", json.dumps(rows, indent=1))
        write_whole(options.out / "parity.md", page(rows, options.steps))
    return int(not all(entry["same"] for entry in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds of --repeat")
    return parser.parse_args()


def chosen(settings: Settings, ranks: int) -> list[Plan]:
    """All plans of 2 ranks, also with what saves memory; of more ranks each product of degrees once, other keys in turn."""
    kinds: dict[tuple[int, ...], list[Plan]] = {}
    for plan in every_plan(ranks, **ends_and_experts(settings)):
        kinds.setdefault(tuple(getattr(plan, axis) for axis in (*AXES, "expert")), []).append(plan)
    if ranks == 2:
        return [plan for plans in kinds.values() for plan in plans] + [
            Plan.model_validate({axis: 2, **more}) for axis, more in zip(cycle(AXES), SAVING, strict=False)
        ]
    # 7 has no divisor in common with the numbers of choices, so that all of them get their turn
    found = [plans[7 * number % len(plans)] for number, plans in enumerate(kinds.values())]
    return found[:: math.ceil(len(found) / MOST)]


def row(verdict: Verdict, model: str, precision: str) -> dict[str, Any]:
    """A line of the table."""
    found = verdict.comparison
    plan = verdict.plan.describe()
    line: dict[str, Any] = {"model": model, "plan": plan, "precision": precision, "same": verdict.same}
    if found is None:
        return line | {"problem": verdict.problem}
    errors = {"loss": found.loss, "norm": found.norm, "gradient": found.gradient, "weights": found.weights}
    more = {"worst": found.worst, "first": found.first.describe() if found.first else None}
    return line | errors | {"closest": round(found.closest, 3)} | more


def page(rows: list[dict[str, Any]], steps: int) -> str:
    """The table as Markdown."""
    most = max(entry.get("closest", 0.0) for entry in rows)
    lines = [
        "# Parity",
        "",
        f"`python benchmarks/parity.py --out DIR --steps {steps}`: the largest relative errors of {steps} steps against one",
        "device in fp64, of a small Llama and a small mixture of experts with grouped heads and tied ends. What is allowed is",
        f"in [verify.md](verify.md); {sum(entry['same'] for entry in rows)} of {len(rows)} are within it, and the largest error",
        f"is {most:.2f} of what is allowed. Errors of gradients are relative to a parameter's, and for experts in bf16, where",
        "rounding can send a token to another expert, to the whole gradient.",
        "",
        "| model | precision | plan | loss | gradient norm | worst gradient | weights | within |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for entry in rows:
        errors = " | ".join(
            f"{entry[name]:.0e}" if name in entry else "" for name in ("loss", "norm", "gradient", "weights")
        )
        said = f"{entry['model']} | {entry['precision']} | {entry['plan']}"
        lines.append(f"| {said} | {errors} | {'yes' if entry['same'] else 'NO'} |")
    return "\n".join(lines) + "\n"


def repeat(all_seeds: range, few: dict[str, tuple[Plan, ...]], precisions: list[str], out: Path) -> int:
    """Compare right code again and again, each time with other weights and data; bf16 is also compared in fp32."""
    accused: list[str] = []
    ratios: list[float] = []
    for at in range(0, len(all_seeds), AT_ONCE):
        seeds = all_seeds[at : at + AT_ONCE]
        named = [
            (f"{model}, seed {seed}, {precision}", settings, plan)
            for (model, plans), precision, seed in product(few.items(), precisions, seeds)
            for settings in [_small_job(model, seed, precision)]
            for plan in plans
        ]
        verdicts = verify_each([(settings, plan) for _, settings, plan in named])
        for (name, _, _), verdict in zip(named, verdicts, strict=True):
            ratios.append(verdict.comparison.closest * SLACK if verdict.comparison else float("inf"))
            if not verdict.same:
                accused.append(f"{name}: {verdict}")
        done = f"{all_seeds.start} to {seeds.stop - 1}"
        found = {
            "seeds": done,
            "compared": len(ratios),
            "largest_ratio": max(ratios),
            "accused": accused,
        }
        print(
            f"seeds {done}: {len(accused)} of {len(ratios)} accused, ratio {max(ratios):.2f}",
            flush=True,
        )
        write_whole(out / "repeat.json", json.dumps(found, indent=1))
    return int(bool(accused))


def _small_job(model: str, seed: int, precision: str) -> Settings:
    return load(JOB, [*MODELS[model], f"train.seed={seed}", f"train.precision={precision}", "run.threads=1"])


if __name__ == "__main__":
    sys.exit(main())
