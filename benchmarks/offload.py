"""What offload to host memory costs and saves at 1.24B parameters, and whether it changes a number, on this machine's GPUs.

    python benchmarks/offload.py --out DIR [--ranks 1] [--only NAME;...] [--size 1b|tiny] [--steps 6] [--total-s 570]

First small fp32 models are trained with and without offload under several plans and compared (row "check"); then each kind is
timed. Each row is a launch of its own; DIR/offload.json and DIR/offload.md are written anew after each. `--size tiny` tries the
rows on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.axes import facts_of_machine
from shoal.config import apply_overrides, parse
from shoal.launch.local import launch
from shoal.run import write_whole

CHECK = "check"
KINDS: dict[str, list[str]] = {
    "none": [],
    "none, again": [],  # how far two equal runs differ
    "optimizer": ["optimizer"],
    "parameters": ["parameters"],
    "activations": ["activations"],
    "optimizer + parameters": ["optimizer", "parameters"],
    "all": ["optimizer", "parameters", "activations"],
    "all, recompute": ["optimizer", "parameters", "activations"],
    "none, recompute": [],
}
MICRO_BATCH = 4
SIZES: dict[str, dict[str, Any]] = {
    "1b": {
        "model": {"preset": "1b"},
        "data": {"source": "synthetic", "vocab": 128256, "seq_len": 2048},
        "train": {"precision": "bf16"},
    },
    "tiny": {
        "model": {"dim": 64, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 512, "tied": True},
        "data": {"source": "synthetic", "vocab": 512, "seq_len": 64},
        "train": {"precision": "bf16"},
        "plan": {"compile": False},
    },
}


def main() -> int:
    """Run the rows; 1 if any has no figures, or the check found a difference."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    asked = options.only.split(";") if options.only else [CHECK, *KINDS]
    records: list[dict[str, Any]] = []
    until = time.monotonic() + options.total_s
    about = facts_of_machine()
    for name in asked:
        left = until - time.monotonic()
        records.append(
            {"name": name, "problem": "no time was left"} if left < 0 else row(name, options, left)
        )
        found = {"machine": about, "ranks": options.ranks, "size": options.size, "rows": records}
        write_whole(options.out / "offload.json", json.dumps(found, indent=1))
        write_whole(options.out / "offload.md", page(records))
        print(json.dumps(records[-1]), flush=True)
    print(page(records))
    return int(any("problem" in record for record in records))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help=f"{CHECK} or names of kinds, separated by ;")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--total-s", type=float, default=3600.0)
    return parser.parse_args()


def row(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One launch, whatever comes of it."""
    try:
        found = launched(name, options, limit_s)
    except Exception as error:
        found: dict[str, Any] = {"problem": f"{type(error).__name__}: {error}"}
    cases: list[dict[str, Any]] = found.get("cases", [])
    differs = [case for case in cases if not case["same"]]
    if differs and "problem" not in found:
        found["problem"] = f"{len(differs)} of {len(cases)} cases differ, first: {differs[0]}"
    return {"name": name} | found


def launched(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """What the ranks of a row wrote, or why they did not."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"run.dir={folder}",
            f"train.steps={options.steps}",
            f"train.global_batch={MICRO_BATCH * options.ranks}",
            f"run.deadline_s={max(30.0, limit_s):.0f}",
            f"plan.shard={options.ranks}",
            f"plan.micro_batch={MICRO_BATCH}",
            f"plan.offload={json.dumps(KINDS.get(name, []))}",
            f"plan.recompute={'full' if name.endswith('recompute') else 'none'}",
        ]
        settings = parse(apply_overrides(SIZES[options.size], words), where=name)
        target = "benchmarks.offload_rank:check" if name == CHECK else "benchmarks.axes_rank:measure"
        outcome = launch(settings, options.ranks, target=target, quiet=True)
        result = Path(folder) / "result.json"
        found = json.loads(result.read_text()) if result.exists() else {}
        failed = outcome.state == "failed" or not found  # cases that came before a failure are kept
        return found | ({"problem": outcome.report[:4000] or "no result"} if failed else {})


def page(records: list[dict[str, Any]]) -> str:
    """The rows as Markdown, and under them the cases of the check."""
    lines = [
        "| in host memory | step ms | tokens/s/GPU | allocated GiB | reserved GiB | loss of the last step |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        if "step_s" in record:
            figures = (
                f"{1000 * record['step_s']:,.0f}",
                f"{record['tokens_per_s_per_rank']:,.0f}",
                f"{record['allocated_gib']:.1f}",
                f"{record['reserved_gib']:.1f}",
                f"{record['losses'][-1]:.6f}",
            )
            lines.append(f"| {record['name']} | " + " | ".join(figures) + " |")
        if "problem" in record:
            lines.append(f"| {record['name']} | {str(record['problem']).splitlines()[0][:90]} | | | | |")
    cases = [case for record in records for case in record.get("cases", [])]
    if cases:
        lines += [
            "",
            "| plan | in host memory | loss differs by | weights differ by |",
            "| --- | --- | ---: | ---: |",
        ]
    for case in cases:
        differs = f"{case['loss']:.1e} | {case['weights']:.1e}" if "loss" in case else f"{case['problem']} | "
        lines.append(f"| {case['plan']} | {', '.join(case['offload']) or 'nothing, again'} | {differs} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
