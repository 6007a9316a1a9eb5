"""How long `import shoal` takes beyond importing torch, in fresh interpreters.

    python benchmarks/import_time.py [--runs 15] [--out benchmarks/results/import_time.json]

Each interpreter imports torch first and then the case, and takes the time of both, so that they are a pair. The goal for
`import shoal` is at most 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.paired import bootstrap
from benchmarks.setting import ROOT
from shoal.bench.show import markdown_table
from shoal.run import write_whole

GOAL_S = 0.3
CASES = {
    "import shoal": "import shoal",
    "every public name": "import shoal; [getattr(shoal, name) for name in shoal.__all__]",
}


class Pair(NamedTuple):
    """Seconds in one interpreter."""

    torch_s: float
    case_s: float


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write JSON; returns 1 if `import shoal` takes more than the goal or imports torch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15, help="interpreters a case")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "import_time.json")
    options = parser.parse_args(words)
    pairs = measure(options.runs)
    lazy = is_lazy()
    summary = {case: summarise(found) for case, found in pairs.items()}
    record = {
        "benchmark": "import_time",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "goal_s": GOAL_S,
        "torch_is_left_alone": lazy,
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "cases": summary,
        "pairs": {case: [pair._asdict() for pair in found] for case, found in pairs.items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(table(summary))
    print(f"\n`import shoal` alone {'leaves torch alone' if lazy else 'imports torch'}")
    return int(summary["import shoal"]["median_s"] > GOAL_S or not lazy)


def measure(runs: int) -> dict[str, list[Pair]]:
    """Pairs of every case, cases in turn, after one run of each that fills the page cache and writes bytecode."""
    found: dict[str, list[Pair]] = {case: [] for case in CASES}
    for run in range(runs + 1):
        for case, code in CASES.items():
            pair = take(code)
            if run:
                found[case].append(pair)
    return found


def take(code: str) -> Pair:
    """Seconds of importing torch, and then of running `code`, in a fresh interpreter."""
    clock = "times.append(time.perf_counter())"
    program = f"import time; times = []; {clock}; import torch; {clock}; {code}; {clock}; print(*times)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    began, middle, end = (float(word) for word in done.stdout.split())
    return Pair(round(middle - began, 4), round(end - middle, 4))


def is_lazy() -> bool:
    """Whether `import shoal` leaves torch unimported."""
    code = "import sys, shoal; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def summarise(pairs: list[Pair]) -> dict[str, float]:
    """Median seconds beyond torch with its 95% interval, and those of torch itself."""
    beyond = np.array([pair.case_s for pair in pairs])
    low, high = bootstrap(beyond, 10_000)
    found = {"median_s": np.median(beyond), "low_s": low, "high_s": high}
    found["torch_s"] = np.median([pair.torch_s for pair in pairs])
    return {name: round(float(value), 4) for name, value in found.items()}


def table(summary: dict[str, dict[str, float]]) -> str:
    """Cases by line."""
    lines = [
        [case, *(f"{one[name] * 1000:.0f}" for name in ("torch_s", "median_s", "low_s", "high_s"))]
        for case, one in summary.items()
    ]
    return markdown_table(["row", "torch ms", "beyond it ms", "95% from", "to"], lines)


if __name__ == "__main__":
    sys.exit(main())
