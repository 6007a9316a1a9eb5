"""How long `import shoal` takes beyond importing torch, in fresh interpreters.

    python benchmarks/import_time.py [--runs 15] [--out benchmarks/results/import_time.json]

Each pair starts one interpreter that imports torch and one that imports torch and shoal. The goal is at most 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.paired import bootstrap
from benchmarks.setting import ROOT
from benchmarks.table import markdown_table
from shoal.run import write_whole

GOAL_S = 0.3
BASE = "import torch"
CASES = {
    "import shoal": "import torch, shoal",
    "every public name": "import torch, shoal; [getattr(shoal, name) for name in shoal.__all__]",
}


def main(words: list[str] | None = None) -> int:
    """Measure, print a table, write JSON; returns 1 if `import shoal` takes more than the goal or imports torch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15, help="pairs of interpreters a case")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "import_time.json")
    options = parser.parse_args(words)
    found = {case: differences(code, options.runs) for case, code in CASES.items()}
    lazy = is_lazy()
    summary = {case: summarise(values) for case, values in found.items()}
    record = {
        "benchmark": "import_time",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "goal_s": GOAL_S,
        "torch_is_left_alone": lazy,
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "cases": summary,
        "differences_s": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(table(summary))
    print(f"\n`import shoal` alone {'leaves torch alone' if lazy else 'imports torch'}")
    return int(summary["import shoal"]["median_s"] > GOAL_S or not lazy)


def differences(code: str, runs: int) -> list[float]:
    """Seconds that `code` takes beyond importing torch, by pair; which comes first changes with every pair."""
    seconds(code)  # files come into the page cache, bytecode is written
    found = []
    for run in range(runs):
        if run % 2:
            more, less = seconds(code), seconds(BASE)
        else:
            less, more = seconds(BASE), seconds(code)
        found.append(round(more - less, 4))
    return found


def seconds(code: str) -> float:
    """Seconds of a fresh interpreter that runs `code`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.perf_counter() - began


def is_lazy() -> bool:
    """Whether `import shoal` leaves torch unimported."""
    code = "import sys, shoal; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def summarise(values: list[float]) -> dict[str, float]:
    low, high = bootstrap(np.array(values), 10_000)
    return {"median_s": round(float(np.median(values)), 4), "low_s": round(low, 4), "high_s": round(high, 4)}


def table(summary: dict[str, dict[str, float]]) -> str:
    lines = [
        [case, f"{one['median_s'] * 1000:.0f}", f"{one['low_s'] * 1000:.0f} to {one['high_s'] * 1000:.0f}"]
        for case, one in summary.items()
    ]
    return markdown_table(["row", "beyond torch ms", "95% interval"], lines)


if __name__ == "__main__":
    sys.exit(main())
