"""Speed and memory of an 8B Llama and a mixture of experts under every axis of parallelism, on this machine's GPUs.

    python benchmarks/axes.py --out DIR [--only NAME,...] [--size 8b|tiny] [--steps 6] [--total-s 570]

Each row is a launch of its own; DIR/axes.json and DIR/axes.md are written anew after each. `--size
tiny` tries the rows on CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.config import apply_overrides, parse
from shoal.launch.local import launch
from shoal.run import write_whole

TARGET = "benchmarks.axes_rank:measure"


class Row(NamedTuple):
    """A plan, and what it trains."""

    name: str
    words: tuple[str, ...]
    moe: bool = False
    """a mixture of experts, and not a Llama"""


HALF = 'plan.recompute_keep=["attention", "every_second_matmul"]'
SELECTIVE = ("plan.recompute=selective", HALF)
SIXTEEN = ("plan.micro_batch=1", "train.global_batch=16")


def rows(ranks: int) -> list[Row]:
    """All rows for so many ranks."""
    n = ranks
    pipeline, shard = f"plan.pipeline={n}", (f"plan.shard={n}", "plan.zero=3")
    long = (f"plan.context={n}", "plan.zero=3", "train.global_batch=1", "plan.recompute=full")
    of_any = [
        Row(f"shard {n}", shard),
        Row(f"shard {n}, float8", (*shard, "train.precision=float8")),
        Row(f"shard {n}, float8_rowwise", (*shard, "train.precision=float8_rowwise")),
        Row(f"tensor {n}", (f"plan.tensor={n}", "plan.micro_batch=1")),
        Row(f"pipeline {n}, 1f1b", (pipeline, *SIXTEEN)),
        Row(
            f"pipeline {n}, interleaved",
            (pipeline, "plan.schedule=interleaved_1f1b", *SIXTEEN, *SELECTIVE),
        ),
        Row(f"pipeline {n}, zero bubble", (pipeline, "plan.schedule=zbv", *SIXTEEN, *SELECTIVE)),
        Row(f"context {n}, 32k", (*long, "data.seq_len=32768")),
        Row(f"context {n}, 64k", (*long, "data.seq_len=65536")),
        Row(f"context {n} all-to-all, 32k", (*long, "plan.context_by=all_to_all", "data.seq_len=32768")),
        Row(f"moe 8x1b, shard {n} x expert {n}", (*shard, f"plan.expert={n}"), moe=True),
        Row(f"moe 8x1b, shard {n}", shard, moe=True),
    ]
    halves = [
        Row("tensor 2 x shard 2", ("plan.tensor=2", "plan.shard=2", "plan.zero=2", "plan.micro_batch=1")),
        Row(
            "pipeline 2 x shard 2",
            ("plan.pipeline=2", "plan.shard=2", "plan.micro_batch=1", "train.global_batch=32", *SELECTIVE),
        ),
    ]
    return of_any + (halves if ranks == 4 else [])


SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "model": {"preset": "8b"},
        "moe": {"family": "moe", "preset": "8x1b"},
        "data": {"source": "synthetic", "vocab": 128256, "seq_len": 8192},
        "train": {"precision": "bf16", "global_batch": 4},
    },
    "tiny": {
        "model": {"dim": 64, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 512, "tied": False},
        "moe": {"family": "moe", "preset": "4x1m", "vocab": 512},
        "data": {"source": "synthetic", "vocab": 512, "seq_len": 64},
        "train": {"precision": "bf16", "global_batch": 4},
        "plan": {"compile": False},
    },
}


def main() -> int:
    """Run the rows; 1 if any has no figures."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    known = {row.name: row for row in rows(options.ranks)}
    named = options.only.split(";") if options.only else list(known)
    unknown = [name for name in named if name not in known]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r} for {options.ranks} ranks; known: {'; '.join(known)}")
    asked = [known[name] for name in named]
    records: list[dict[str, Any]] = []
    until = time.monotonic() + options.total_s
    about = facts_of_machine()
    for row in asked:
        if time.monotonic() > until:
            records.append({"name": row.name, "problem": "no time was left"})
        else:
            records.append(run(row, options, until - time.monotonic()))
        write_whole(options.out / "axes.json", json.dumps({"machine": about, "rows": records}, indent=1))
        write_whole(options.out / "axes.md", table(records))
        print(json.dumps(records[-1]), flush=True)
    print(table(records))
    return int(any("step_s" not in record for record in records))


def facts_of_machine() -> dict[str, Any]:
    """Devices and versions, asked by a process of its own, so that this one holds no memory on a GPU."""
    asked = subprocess.run(
        [sys.executable, "-m", "shoal.observe.machine"], capture_output=True, text=True, check=False
    )
    return json.loads(asked.stdout) if asked.returncode == 0 else {}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of rows, separated by ;")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--total-s", type=float, default=3600.0)
    return parser.parse_args()


def run(row: Row, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One launch."""
    words = [word for word in row.words if options.size == "8b" or not word.startswith("data.")]
    with tempfile.TemporaryDirectory() as folder:
        more = [
            f"run.dir={folder}",
            f"train.steps={options.steps}",
            f"run.deadline_s={max(30.0, limit_s):.0f}",
        ]
        size = {key: value for key, value in SIZES[options.size].items() if key != "moe"}
        size["model"] = SIZES[options.size]["moe" if row.moe else "model"]
        settings = parse(apply_overrides(size, [*words, *more]), where=row.name)
        outcome = launch(settings, options.ranks, target=TARGET, quiet=True)
        result = Path(folder) / "result.json"
        record = {"name": row.name, "plan": " ".join(words)}
        if not result.exists():
            return record | {"problem": outcome.report[:2000]}
        return record | json.loads(result.read_text())


def table(records: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| plan | tokens/s/GPU | MFU % | allocated GiB | reserved GiB | step s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        if "step_s" not in record:
            lines.append(f"| {record['name']} | {record['problem'].splitlines()[0][:90]} | | | | |")
            continue
        mfu = "" if record["mfu"] is None else f"{100 * record['mfu']:.1f}"
        rate = f"{record['tokens_per_s_per_rank']:,.0f}"
        figures = (rate, mfu, record["allocated_gib"], record["reserved_gib"], record["step_s"])
        lines.append(f"| {record['name']} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
