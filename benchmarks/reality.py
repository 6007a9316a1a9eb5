"""What `shoal plan` says without a GPU, beside what the same plans took on GPUs: memory and step time of every row.

    python benchmarks/reality.py --of MEASURED [--of MEASURED ...] [--out FILE] [--only TEXT] [--at-once 2]

Reads what `benchmarks/reality_measure.py` wrote, runs `shoal plan JOB --on ... --json` for each row, by the profile of the file
if it has one, and writes every row, good and bad, with its errors. Needs no GPU. Some factors of the model of time were taken
from runs: see docs/planning.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reality_measure import Row, tables_of
from shoal.run import write_whole

HERE = Path(__file__).resolve().parent
GIB = 1024**3
KINDS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}


class Real(NamedTuple):
    """A run on GPUs."""

    file: str
    name: str
    job: dict[str, Any] | str
    """of a job file, its tables or its name in jobs/"""
    words: list[str]
    on: str
    step_s: float
    allocated_gib: float
    reserved_gib: float | None
    """None where it was not counted rightly: the file says why"""
    profile: str = ""
    """JSON of what its devices were measured to take; empty: what comes with shoal"""


def main() -> int:
    """Predict every row; 1 if one has no prediction."""
    options = _options()
    known = [real for path in options.of for real in of_one_command(path)]
    asked = [real for real in known if options.only in f"{real.file} {real.name}"]
    with ThreadPoolExecutor(options.at_once) as pool:
        records = []
        for record in pool.map(predict, asked):
            records.append(record)
            print(json.dumps(record), flush=True)
    kept = {
        "command": shlex.join(["python", "benchmarks/reality.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "rows": records,
        "summary": summary(records),
        "by_file": {
            file: summary([record for record in records if record["file"] == file])
            for file in dict.fromkeys(record["file"] for record in records)
        },
    }
    if options.out:
        write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    print(table(records))
    return int(any("problem" in record for record in records))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--of", type=Path, action="append", required=True, help="what reality_measure.py wrote"
    )
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default="", help="rows whose file and name have this text")
    parser.add_argument("--at-once", type=int, default=2)
    return parser.parse_args()


def of_one_command(path: Path) -> Iterator[Real]:
    """All rows of a file of `reality_measure.py` that have figures."""
    kept = json.loads(path.read_text())
    if kept["size"] != "full":
        raise SystemExit(
            f"--of {path}: it has rows of --size {kept['size']}, which are of no device that is known"
        )
    on = on_text(kept["machine"] | {"devices": kept["ranks"]})
    profile = json.dumps(kept["profile"]) if kept.get("profile") else ""
    for row in kept["rows"]:
        if "step_s" in row:
            size, words = row["name"].split(" ", 1)
            job = tables_of(Row(size, words))
            figures = row["step_s"], row["allocated_gib"], row["reserved_gib"]
            yield Real(path.stem, row["name"], job, [], on, *figures, profile=profile)


def on_text(machine: dict[str, Any]) -> str:
    return f"{machine['devices']} {KINDS[machine['device']]}"


def predict(real: Real) -> dict[str, Any]:
    """A row: what was said and what was measured."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        job = HERE / "jobs" / f"{real.job}.toml"
        if isinstance(real.job, dict):
            job = Path(folder) / "job.toml"
            job.write_text(tomli_w.dumps(real.job))
        command = ["plan", str(job), *real.words, "--on", real.on, "--expandable", "--json"]
        if real.profile:
            measured_here = Path(folder) / "profile.json"
            measured_here.write_text(real.profile)
            command += ["--profile", str(measured_here)]
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *command],
            capture_output=True,
            text=True,
            cwd=HERE.parent,
            check=False,
        )
    shown: dict[str, Any] = {
        "file": real.file,
        "name": real.name,
        "on": real.on,
        "words": shlex.join(real.words),
        "seconds": round(time.perf_counter() - began, 1),
    }
    if done.returncode not in (0, 1) or not done.stdout.strip():
        return shown | {"problem": done.stderr.strip()[-400:]}
    said = json.loads(done.stdout)
    figures = {
        "step_s": (said["step"]["seconds"], real.step_s),
        "allocated_gib": (max(rank["allocated_bytes"] for rank in said["ranks"]) / GIB, real.allocated_gib),
        "reserved_gib": (max(rank["reserved_bytes"] for rank in said["ranks"]) / GIB, real.reserved_gib),
    }
    for key, (predicted, found) in figures.items():
        shown[key] = {
            "predicted": round(predicted, 4),
            "measured": found,
            "error": None if found is None else round(predicted / found - 1, 4),
        }
    return shown | {"parts": said["step"]["parts"]}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst of the errors without their signs."""
    found = {}
    for key in ("step_s", "allocated_gib", "reserved_gib"):
        told = [record[key]["error"] for record in records if key in record]
        errors = [abs(error) for error in told if error is not None]
        if errors:
            found[key] = {
                "rows": len(errors),
                "mean": round(statistics.mean(errors), 4),
                "median": round(statistics.median(errors), 4),
                "worst": round(max(errors), 4),
            }
    return found


def table(records: list[dict[str, Any]]) -> str:
    """All rows as Markdown."""
    lines = [
        "| run | on | allocated GiB, said / measured | reserved GiB | step ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for record in records:
        if "problem" in record:
            lines.append(
                f"| {record['name']} | {record['on']} | {record['problem'].splitlines()[-1][:80]} | | |"
            )
            continue
        cells = [
            _cell(record[key], scale, digits)
            for key, scale, digits in (("allocated_gib", 1, 2), ("reserved_gib", 1, 2), ("step_s", 1000, 1))
        ]
        lines.append(f"| {record['name']} | {record['on']} | {' | '.join(cells)} |")
    for key, each in summary(records).items():
        lines.append(
            f"\n{key}: mean {each['mean']:.1%}, median {each['median']:.1%}, worst {each['worst']:.1%}"
        )
    return "\n".join(lines)


def _cell(figure: dict[str, float | None], scale: float, digits: int) -> str:
    said, measured, error = ((figure[key] or 0.0) for key in ("predicted", "measured", "error"))
    if figure["measured"] is None:
        return f"{said * scale:.{digits}f} / not told"
    return f"{said * scale:.{digits}f} / {measured * scale:.{digits}f} ({error:+.1%})"


if __name__ == "__main__":
    sys.exit(main())
