"""What plans take on this machine's GPUs, measured by one command: the rows that `benchmarks/reality.py` predicts.

    python benchmarks/reality_measure.py --out FILE [--ranks 2] [--only TEXT,...] [--total-s 560] [--size full|tiny]
                                         [--profile-s 45]

First `shoal bench device` measures the devices, so that rows are predicted by what these, on their host, take (`--profile-s 0`:
not). Then three sizes of Llama and a mixture of experts; every axis; eager, compiled, recorded; recompute, offload, precision.
Rows of one launch follow each other in the same processes, which are started again after a row that fails or leaves memory
behind. FILE is written after each launch, and FILE.jsonl row by row meanwhile. After a SIGTERM, or --total-s, no other row
begins; those that were not reached say so. `--size tiny` tries the rows on CPU ranks, without a profile.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.axes import facts_of_machine
from benchmarks.reality_rank import ASKED, LEFT
from shoal.bench.device import bench_device
from shoal.bench.step import BenchError
from shoal.config import apply_overrides, parse
from shoal.launch.local import launch
from shoal.run import read_json_lines, write_whole
from shoal.world import detect_cluster

TARGET = "benchmarks.reality_rank:measure"
SIZES: dict[str, dict[str, Any]] = {
    "150m": {"model": {"preset": "150m"}, "data": {"vocab": 32000, "seq_len": 2048}},
    "1b": {"model": {"preset": "1b"}, "data": {"vocab": 128256, "seq_len": 2048}},
    "8b": {"model": {"preset": "8b"}, "data": {"vocab": 128256, "seq_len": 8192}},
    "moe": {
        "model": {"family": "moe", "preset": "8x1b"},
        "data": {"vocab": 128256, "seq_len": 8192},
    },
}
TINY: dict[str, Any] = {
    "model": {"dim": 64, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 512, "tied": False}
}
TINY_MOE: dict[str, Any] = {"model": {"family": "moe", "preset": "4x1m", "vocab": 512}}


class Row(NamedTuple):
    """A plan, and what it trains."""

    size: str
    words: str

    @property
    def name(self) -> str:
        return f"{self.size} {self.words}"


EAGER, BLOCKS, RECORDED = (
    "plan.compile=false",
    "plan.compile=true",
    "plan.compile=true plan.cuda_graphs=true",
)


def rows(n: int) -> list[Row]:
    """All rows for so many ranks; the batch is of the whole job."""
    four = f"plan.micro_batch=4 train.global_batch={4 * n}"
    copies, zero2, zero3 = f"plan.replicate={n}", f"plan.shard={n} plan.zero=2", f"plan.shard={n} plan.zero=3"
    zero1 = f"plan.shard={n} plan.zero=1"
    one = f"plan.micro_batch=1 train.global_batch={n}"
    alone = "plan.micro_batch=1 train.global_batch=1"
    tensor, pipeline, context = f"plan.tensor={n}", f"plan.pipeline={n}", f"plan.context={n} plan.zero=3"
    found: list[tuple[str, str]] = [
        *(("150m", f"{copies} {four} {how}") for how in (EAGER, BLOCKS, "plan.compile=model")),
        ("150m", f"{zero2} {four} {RECORDED}"),
        *(("1b", f"{plan} {four} {EAGER}") for plan in (copies, zero3)),
        *(("1b", f"{plan} {four} {BLOCKS}") for plan in (copies, zero1, zero3)),
        ("1b", f"{zero2} {four} {RECORDED}"),
        ("1b", f"{zero2} {four} {RECORDED} train.precision=float8"),
        ("1b", f"{zero2} plan.micro_batch=4 train.global_batch={16 * n} {BLOCKS}"),
        *(
            ("1b", f"{zero3} {four} {BLOCKS} {more}")
            for more in ("plan.recompute=full", "plan.offload=optimizer", "plan.offload=activations")
        ),
        ("1b", f"{tensor} plan.micro_batch=4 train.global_batch=4 {BLOCKS}"),
        ("1b", f"{pipeline} plan.micro_batch=4 train.global_batch=32 {BLOCKS}"),
        ("1b", f"{context} {alone} data.seq_len=16384 {BLOCKS}"),
        ("1b", f"{context} plan.context_by=all_to_all {alone} data.seq_len=16384 {BLOCKS}"),
        ("8b", f"{zero2} {one} {BLOCKS}"),
        ("8b", f"{zero2} {one} {BLOCKS} train.precision=float8_gather"),
        ("8b", f"{zero3} {one} {BLOCKS}"),
        ("8b", f"{zero3} {one} {BLOCKS} plan.recompute=selective"),
        ("8b", f"{zero3} {one} {EAGER} plan.recompute=full"),
        ("8b", f"{tensor} {alone} {BLOCKS}"),
        ("8b", f"{pipeline} plan.micro_batch=1 train.global_batch=8 {BLOCKS} plan.recompute=full"),
        ("8b", f"{context} {alone} data.seq_len=32768 {BLOCKS} plan.recompute=full"),
        ("moe", f"{zero3} {one} {BLOCKS}"),
        ("moe", f"{zero3} plan.expert={n} {one} {BLOCKS}"),
    ]
    return [Row(*pair) for pair in found]


def tables_of(row: Row, tiny: bool = False) -> dict[str, Any]:
    """The row's job, as a job file would have it.

    Args:
        tiny: of a model that CPU ranks take steps of in no time, neither compiled nor recorded, in fp32.
    """
    size, words = SIZES[row.size], ["plan.cuda_graphs=false", *shlex.split(row.words)]
    if tiny:
        size = (TINY_MOE if row.size == "moe" else TINY) | {"data": {"vocab": 512, "seq_len": 64}}
        left_out = ("plan.compile", "plan.cuda_graphs", "data.seq_len", "train.precision")
        words = [word for word in words if not word.startswith(left_out)] + ["plan.compile=false"]
    data = {"source": "synthetic", "eval_fraction": 0.0} | size["data"]
    base = {"model": size["model"], "data": data, "train": {"precision": "fp32" if tiny else "bf16"}}
    optimizer = {"name": "adamw", "lr": 1e-5, "schedule": "constant"}
    return apply_overrides(base | {"optimizer": optimizer}, words)


def main() -> int:
    """Run the rows; 1 if any has no figures."""
    options = _options()
    asked = [
        row
        for row in rows(options.ranks)
        if not options.only or any(text in row.name for text in options.only.split(","))
    ]
    if not asked:
        raise SystemExit(
            f"--only {options.only}: no row's name has it; names: {'; '.join(row.name for row in rows(options.ranks))}"
        )
    until, ends = time.monotonic() + options.total_s, False
    kept: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/reality_measure.py", *sys.argv[1:]]),
        "machine": facts_of_machine(),
        "ranks": options.ranks,
        "size": options.size,
        "profile": None,
        "rows": [],
    }
    records: list[dict[str, Any]] = kept["rows"]
    kept |= _profile(options)
    write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    while len(records) < len(asked) and not ends:
        found, ends = _launched(asked[len(records) :], options, until - time.monotonic())
        records += found
        write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    records += [{"name": row.name, "problem": "not reached"} for row in asked[len(records) :]]
    write_whole(options.out, json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept, indent=1))
    return int(any("problem" in record for record in records))


def _profile(options: argparse.Namespace) -> dict[str, Any]:
    """Of these devices, if it is asked for, or why there is none: rows are measured all the same."""
    if not options.profile_s or options.size == "tiny":
        return {}
    try:
        found = bench_device(detect_cluster(), options.ranks, options.profile_s)
    except (BenchError, ValueError) as error:
        return {"no_profile": str(error)[:2000]}
    return {"profile": found.model_dump(mode="json")}


def _launched(
    asked: list[Row], options: argparse.Namespace, limit_s: float
) -> tuple[list[dict[str, Any]], bool]:
    """What one launch found: rows in their order, the last with a problem if it failed; and whether it was to be the last."""
    tables = [(row.name, tables_of(row, options.size == "tiny")) for row in asked]
    lines = options.out.with_name(f"{options.out.name}.jsonl").resolve()
    lines.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ask = {"found": str(lines), "limit_s": limit_s, "rows": tables}
        write_whole(Path(folder) / ASKED, json.dumps(ask))
        more = {"run": {"dir": folder, "restarts": 0, "deadline_s": 150.0}}
        settings = parse(tables[0][1] | more, where=asked[0].name)
        outcome = launch(settings, options.ranks, target=TARGET, quiet=True)
    found = list(read_json_lines(lines)) if lines.exists() else []
    lines.unlink(missing_ok=True)
    if outcome.state != "failed":
        return found, not (found and LEFT in found[-1])
    if len(found) < len(asked):
        found.append({"name": asked[len(found)].name, "problem": outcome.report[:2000]})
    return found, False


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name has one of these texts")
    parser.add_argument("--total-s", type=float, default=3600.0)
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--profile-s", type=float, default=45.0, help="how long devices are measured first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
