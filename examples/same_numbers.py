"""The same job under several plans: one table of losses and gradient norms, which are the same numbers.

    python examples/same_numbers.py [--steps 20] [--job examples/quickstart.toml]

Each row is a `shoal train` of its own, on 1, 2 or 4 processes of this machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PLANS = {
    "1 process": "plan.replicate=1",
    "2 processes, replicate": "plan.replicate=2",
    "4 processes, replicate": "plan.replicate=4",
    "2 processes, ZeRO-1": "plan.shard=2 plan.zero=1",
    "2 processes, ZeRO-2": "plan.shard=2 plan.zero=2",
    "2 processes, ZeRO-3": "plan.shard=2 plan.zero=3",
    "4 processes, replicate 2 x ZeRO-3": "plan.replicate=2 plan.shard=2",
}


def main() -> None:
    """Run every plan and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--job", default=str(Path(__file__).parent / "quickstart.toml"))
    parser.add_argument("--only", type=int, default=len(PLANS), help="so many plans, from the first")
    given = parser.parse_args()
    shown = [1, given.steps // 2, given.steps]
    print(
        f"| plan | {' | '.join(f'loss, step {step}' for step in shown)} | gradient norm, step {given.steps} |"
    )
    print("| --- " * (len(shown) + 2) + "|")
    for name, words in list(PLANS.items())[: given.only]:
        metrics = train(given.job, words.split(), given.steps)
        losses = " | ".join(f"{metrics[step]['loss']:.5f}" for step in shown)
        print(f"| {name} | {losses} | {metrics[given.steps]['grad_norm']:.5f} |", flush=True)


def train(job: str, words: list[str], steps: int) -> dict[int, dict[str, float]]:
    """The metrics of a short run, by step."""
    with tempfile.TemporaryDirectory() as folder:
        rest = [f"train.steps={steps}", f"run.dir={folder}", "train.eval_samples=1"]
        command = [sys.executable, "-m", "shoal", "train", job, *words, *rest, "checkpoint.last=false"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines) if "loss" in record}


if __name__ == "__main__":
    main()
