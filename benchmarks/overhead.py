"""What the product's `Step` costs above the same step written by hand, on two CPU ranks.

    python benchmarks/overhead.py [--preset 1m] [--pairs 200] [--paired] [--out benchmarks/results/overhead.json]

Both train the same model from the same weights on the same tokens in the same two processes, some steps of one and some of
the other in turn, so that the machine's noise meets both. The goal is at most 3%.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing as mp

from benchmarks.by_hand import step_by_hand
from benchmarks.paired import Comparison, compare
from benchmarks.setting import ROOT
from shoal.bench.show import markdown_table
from shoal.data.batches import batches, open_dataset
from shoal.data.cut import StepBatch
from shoal.job import Data, Job, Model, Optimizer, Train
from shoal.models.llama import Llama
from shoal.models.presets import resolve
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.run import write_whole
from shoal.train.objective import NextToken
from shoal.train.step import Step
from shoal.world import World, join_world

RANKS = 2
PLANS = {"replicate": Plan(replicate=RANKS), "zero3": Plan(shard=RANKS, zero=3)}
GOAL = 0.03
WARMUP = 5  # pairs that are not counted
VOCAB = 512
TAKE = Callable[[StepBatch], float]


class Options(NamedTuple):
    """The command line."""

    preset: str
    seq_len: int
    batch: int
    pairs: int
    steps: int
    paired: bool
    out: Path


class Timed(NamedTuple):
    """Seconds and losses by block of both ways, on rank 0."""

    product: list[list[float]]
    by_hand: list[list[float]]
    largest_difference: float
    """of the two losses of any step"""


def main(words: list[str] | None = None) -> int:
    """Measure every plan, print a table, write JSON; returns 1 if a plan is above the goal."""
    options = read_options(words)
    results: dict[str, dict[str, Any]] = {}
    for name in PLANS:
        timed = run_plan(name, options)
        compared = compare(timed.product, timed.by_hand)
        results[name] = {**compared._asdict(), "largest_loss_difference": timed.largest_difference}
        results[name] |= {"product_seconds": timed.product, "by_hand_seconds": timed.by_hand}
        print(f"{name}: {compared.overhead:+.1%}", flush=True)
    write_results(results, options)
    print(table({name: _comparison(record) for name, record in results.items()}, intervals=options.paired))
    return int(any(record["overhead"] > GOAL for record in results.values()))


def read_options(words: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="1m", help="dimensions of the model")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="samples a step, over both ranks")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="steps a block")
    parser.add_argument(
        "--paired", action="store_true", help="show the 95%% interval of the paired differences"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overhead.json")
    return Options(**vars(parser.parse_args(words)))


def run_plan(name: str, options: Options) -> Timed:
    """Measure one plan in two fresh processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, name, options), nprocs=RANKS)
        return Timed(**json.loads((Path(folder) / "timed.json").read_text()))


def _rank(rank: int, folder: str, name: str, options: Options) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    with join_world(
        init_method=f"file://{folder}/store", device="cpu", rank=rank, size=RANKS, local_rank=rank
    ) as here:
        timed = measure(PLANS[name], here, options)
        if here.is_main:
            (Path(folder) / "timed.json").write_text(json.dumps(timed._asdict()))


def measure(plan: Plan, here: World, options: Options) -> Timed:
    """Take blocks of steps of both ways in turn; which comes first changes with every pair."""
    job = Job(
        model=Model(preset=options.preset),
        data=Data(source="synthetic", vocab=VOCAB, seq_len=options.seq_len, eval_fraction=0.0),
        train=Train(steps=(options.pairs + WARMUP) * options.steps, global_batch=options.batch),
        optimizer=Optimizer(lr=1e-3, schedule="constant"),
    )
    product, by_hand = steps_of(job, plan, here)
    data = list(batches(open_dataset(job.data, 0, None).train, job, plan, here))
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    difference = 0.0
    for pair in range(options.pairs + WARMUP):
        block = data[pair * options.steps : (pair + 1) * options.steps]
        losses: dict[int, list[float]] = {}
        for way in (0, 1) if pair % 2 else (1, 0):
            here.barrier(f"pair {pair}, way {way}")
            seconds, losses[way] = take((product, by_hand)[way], block)
            if pair >= WARMUP:
                times[way].append(seconds)
        difference = max(difference, *(abs(a - b) for a, b in zip(losses[0], losses[1], strict=True)))
    return Timed(*times, difference)


def steps_of(job: Job, plan: Plan, here: World) -> tuple[TAKE, TAKE]:
    """The product's step and the one by hand, from equal weights; both return the loss over all ranks."""
    dims = resolve(job.model, job.data.vocab)
    model = parallelize(lambda: Llama(dims), plan, here, seed=job.train.seed)
    weight = job.train.global_batch * job.data.seq_len
    step = Step(
        model, NextToken(), job.optimizer, plan, here, total_steps=job.train.steps, usual_weight=weight
    )
    return lambda batch: step(batch).loss, step_by_hand(dims, job.optimizer, plan, here, job.train.seed)


def take(step: TAKE, block: list[StepBatch]) -> tuple[list[float], list[float]]:
    """Seconds and losses of steps."""
    seconds, losses = [], []
    for batch in block:
        began = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
    return seconds, losses


def _comparison(record: dict[str, Any]) -> Comparison:
    return Comparison(*(record[name] for name in Comparison._fields))


def table(compared: dict[str, Comparison], *, intervals: bool) -> str:
    """Plans by line."""
    header = ["row", "product ms", "by hand ms", "overhead %", *(["95% interval"] if intervals else [])]
    lines = []
    for name, one in compared.items():
        interval = [f"{one.low * 100:+.1f} to {one.high * 100:+.1f}"] if intervals else []
        times = [f"{one.first_s * 1000:.2f}", f"{one.second_s * 1000:.2f}"]
        lines.append([name, *times, f"{one.overhead * 100:+.1f}", *interval])
    return markdown_table(header, lines)


def write_results(results: dict[str, dict[str, Any]], options: Options) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": "overhead",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "goal": GOAL,
        "setting": {**options._asdict(), "out": None, "ranks": RANKS, "vocab": VOCAB, "precision": "fp32"},
        "machine": {"cpus": os.cpu_count(), "torch": torch.__version__},
        "plans": results,
    }
    write_whole(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
