"""Speed and memory of a 1.24B Llama on this machine's GPUs: the product's plans and its peers in one table.

    python benchmarks/step_1b.py --out DIR [--steps 20] [--only NAME,...] [--size 1b|tiny]

Every row is a command of its own with a time limit; DIR/step_1b.json and DIR/step_1b.md are written anew after each.
Without a GPU, `--size tiny` tries the same on two CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import machine
from benchmarks.processes import Ended, first_error, last_words, run_limited
from benchmarks.rows import Row, command_of, figures, obstacle, read_peer, read_run, rows
from benchmarks.setting import JOBS, ROOT, Setting, read_setting
from benchmarks.table import headline, rows_table
from shoal.run import write_whole

JOB_FILES = {"1b": JOBS / "llama_1b.toml", "tiny": JOBS / "tiny.toml"}
CPU_RANKS = 2
LEAST_S = 20.0  # a row with less time left is not begun
ABOUT = (
    "Median step over the steps after the warm-up. Every row starts from the same weights and reads the same tokens at the "
    "same rate with the same optimizer. MFU counts full attention. Allocated and reserved: the allocator's peak, the most over "
    "the ranks (on a CPU: resident memory); in use: nvidia-smi's, the most over the GPUs. Clock and power: median over "
    "GPUs while the counted steps ran."
)


class Options(NamedTuple):
    """The command line."""

    out: Path
    steps: int
    only: list[str]
    size: str
    limit_s: float
    total_s: float


class Bench(NamedTuple):
    """What all rows share."""

    setting: Setting
    machine: dict[str, Any]
    flops_per_token: float
    env: dict[str, str]
    out: Path
    limit_s: float
    """what a row may take while there is time for it"""


def main(words: list[str] | None = None) -> int:
    """Run the rows; returns 1 if any of them has no figures."""
    options = read_options(words)
    bench = prepare(options)
    asked = choose(rows(bench.setting.ranks), options.only)
    records: list[dict[str, Any]] = []
    deadline = time.monotonic() + options.total_s
    for row in asked:
        print(f"{row.name} ...", flush=True)
        records.append(run_row(row, bench, min(options.limit_s, deadline - time.monotonic())))
        write_results(bench, options, records)
        print(f"{row.name}: {one_line(records[-1])}", flush=True)
    print(f"\n{rows_table(records)}\n\n{bench.out / 'step_1b.json'}", flush=True)
    return int(any("step_s" not in record for record in records))


def read_options(words: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps a row, up to 5 of them warm-up"
    )
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--size", choices=list(JOB_FILES), default="1b")
    parser.add_argument("--limit", type=float, default=150, help="seconds a row may take")
    parser.add_argument("--total", type=float, default=570, help="seconds for all rows")
    given = parser.parse_args(words)
    only = [name for name in given.only.split(",") if name]
    return Options(given.out.resolve(), given.steps, only, given.size, given.limit, given.total)


def prepare(options: Options) -> Bench:
    """Ask what the machine is, and settle what is trained on it."""
    from shoal.train.flops import llama_flops_per_token

    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    env = environment()
    here = machine.ask(env, ROOT)
    ranks = here["devices"] or CPU_RANKS
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    setting = read_setting(JOB_FILES[options.size], ranks, options.steps)
    flops = llama_flops_per_token(setting.dims, setting.job.data.seq_len)
    return Bench(setting, here, flops, env, options.out, options.limit_s)


def environment() -> dict[str, str]:
    """The caller's variables, this repository on the import path, and one cache of compiled kernels for all rows."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "benchmarks-inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    return {**defaults, **os.environ, "PYTHONPATH": path}


def choose(all_rows: list[Row], only: list[str]) -> list[Row]:
    """The rows that are asked for, in the table's order.

    Raises:
        SystemExit: an unknown name; the message lists those that there are.
    """
    names = [row.name for row in all_rows]
    if unknown := [name for name in only if name not in names]:
        raise SystemExit(f"--only {','.join(unknown)}: no such row; rows: {', '.join(names)}")
    return [row for row in all_rows if not only or row.name in only]


def run_row(row: Row, bench: Bench, limit_s: float) -> dict[str, Any]:
    """Run one row and tell everything about it; whatever goes wrong becomes its `error`."""
    record: dict[str, Any] = {"name": row.name, "setting": row.setting}
    if problem := obstacle(row, on_gpu=bench.machine["devices"] > 0):
        return {**record, "error": problem}
    if limit_s < min(LEAST_S, bench.limit_s):
        return {**record, "error": "not run: the time for all rows was over"}
    run_dir = Path(tempfile.mkdtemp(prefix="step_1b-"))
    samples = bench.out / "logs" / f"{row.name}.gpus.csv"
    command = command_of(row, bench.setting, run_dir)
    try:
        with machine.sampled(samples):
            ended = run_limited(
                command, cwd=ROOT, env=bench.env, log=bench.out / "logs" / row.name, limit_s=limit_s
            )
        measured = read_run(run_dir, bench.setting) if row.plan else read_peer(ended.output)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    record |= {
        "command": ["python", *command[1:]],
        "wall_s": round(ended.seconds, 1),
        "exit_code": ended.code,
    }
    record["gpu"] = machine.summary(machine.read_samples(samples), measured.window if measured else None)
    if measured:
        peak = bench.machine["peak_flops"]
        record |= figures(measured, bench.setting, bench.flops_per_token, peak)
    if ended.code != 0:
        record["error"] = error_text(ended, limit_s)
    elif not measured:
        record["error"] = f"ended well but told no figures; see {ended.output}"
    return record


def error_text(ended: Ended, limit_s: float) -> str:
    """How it ended and what it said of it, then the end of its log."""
    how = f"not done after {limit_s:.0f} s" if ended.code is None else f"exit code {ended.code}"
    log = last_words(ended.errors) or last_words(ended.output)
    return f"{how}: {first_error(ended.errors)}\n{log}".strip()


def write_results(bench: Bench, options: Options, records: list[dict[str, Any]]) -> None:
    """Write all rows so far, as JSON and as a table."""
    setting = bench.setting
    result = {
        "benchmark": "step_1b",
        "size": options.size,
        "about": ABOUT,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "setting": {
            "job": setting.job.model_dump(mode="json"),
            "dims": setting.dims._asdict(),
            "parameters": setting.parameters,
            "ranks": setting.ranks,
            "micro_batch": setting.micro_batch,
            "warmup": setting.warmup,
            "flops_per_token": bench.flops_per_token,
        },
        "machine": bench.machine,
        "environment": {
            name: bench.env[name]
            for name in sorted(bench.env)
            if name.startswith(("NCCL_", "PYTORCH_", "TORCH", "OMP_"))
        },
        "rows": records,
    }
    write_whole(bench.out / "step_1b.json", json.dumps(result, indent=1) + "\n")
    write_whole(bench.out / "step_1b.md", document(bench, records))


def document(bench: Bench, records: list[dict[str, Any]]) -> str:
    """The Markdown file."""
    setting, here = bench.setting, bench.machine
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items() if version)
    devices = (
        f"{here['devices']} x {here['device']}" if here["devices"] else f"{setting.ranks} ranks on a CPU"
    )
    job = setting.job
    title = f"# {setting.parameters / 1e9:.2f}B Llama, {devices}"
    what = (
        f"Sequence {job.data.seq_len}, micro-batch {setting.micro_batch}, global batch {job.train.global_batch}, "
        f"{job.train.precision}, no recompute, {job.train.steps} steps of which {setting.warmup} are warm-up. {versions}."
    )
    return "\n\n".join([title, what, rows_table(records), ABOUT]) + "\n"


def one_line(record: dict[str, Any]) -> str:
    error = f" ERROR {headline(record['error'])}" if "error" in record else ""
    if "step_s" not in record:
        return error.strip()
    speed = f"{record['step_s'] * 1000:.1f} ms, {record['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    return f"{speed}; the row took {record['wall_s']:.0f} s{error}"


if __name__ == "__main__":
    sys.exit(main())
