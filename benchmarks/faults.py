"""A campaign of failures: whatever is done to a run, it ends by itself with the numbers of a run that nothing disturbed.

    python benchmarks/faults.py --out DIR [--singles 200] [--schedules 500] [--seed 0] [--total-s 7200]

Singles are one failure each: every kind, on every rank, in every phase, in turn. Schedules are one to three failures that
a seed draws. Each run is compared with an undisturbed one of its plan: losses, norms, rates and tokens of all steps, and
every tensor of the last checkpoint, bit for bit. DIR/faults.json has a line a run; the command ends with 1 if one differs,
names another rank than the one that failed, or took more than one step again.

Launches begin with torch imported (as those of the tests do): what is measured is a run that goes on, and not how Python starts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.checkpoint.check import one
from shoal.checkpoint.plain import whole_tensors
from shoal.config import Settings, parse
from shoal.launch.local import Outcome, launch
from shoal.launch.ranks import Ranks
from shoal.launch.ready import make_ready
from shoal.observe.machine import facts
from shoal.resilience.faults import ALL_KINDS, DRAWN, FLIP, LOADER, PHASES
from shoal.run import read_json_lines, write_whole
from tests.launch.warm import start

STEPS = 6
DEADLINE_S = 4.0  # after which a hang is found
PLANS: dict[str, dict[str, Any]] = {
    "shard 2": {"shard": 2},
    "replicate 2": {"replicate": 2},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
}
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens")


class Numbers(NamedTuple):
    """What no failure may change."""

    steps: list[tuple[Any, ...]]
    tensors: dict[str, bytes]


def main() -> int:
    """Run the campaign; 1 if a run did not end as the undisturbed one."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.total_s
    right: dict[str, Numbers] = {}
    records: list[dict[str, Any]] = []
    with patch.object(Ranks, "start", start):
        for plan, faults in [
            *singles(options.singles, options.seed),
            *schedules(options.schedules, options.seed),
        ]:
            if time.monotonic() > until:
                break
            if plan not in right:
                right[plan] = _undisturbed(plan)
            records.append(attempt(plan, faults, right[plan]))
            if not records[-1]["right"]:
                print(json.dumps(records[-1]), flush=True)
    counts = f"--singles {options.singles} --schedules {options.schedules} --seed {options.seed}"
    found = {"command": f"python benchmarks/faults.py --out DIR {counts}", "machine": facts()}
    kept = found | {"summary": summary(records), "runs": records}
    write_whole(options.out / "faults.json", json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept["summary"], indent=1))
    return int(not all(record["right"] for record in records))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--singles", type=int, default=200)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-s", type=float, default=7200.0)
    return parser.parse_args()


def singles(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(plan, faults): every kind in every phase on every rank, in an order that a seed shuffles."""
    kinds = [kind for kind in ALL_KINDS if kind not in ("slow", FLIP, LOADER)]
    every = [
        (plan, f"{kind} rank={rank} step={1 + number % (STEPS - 2)} phase={phase}")
        for number, (plan, kind, phase) in enumerate(product(PLANS, kinds, PHASES[:4]))
        for rank in range(_ranks(plan))
    ]
    random.Random(seed).shuffle(every)
    yield from every[:count]


def schedules(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(plan, faults): one to three faults."""
    source = random.Random(f"schedules {seed}")
    for _ in range(count):
        plan = source.choice(list(PLANS))
        faults = [
            f"{source.choice(DRAWN)} rank={source.randrange(_ranks(plan))} step={source.randrange(STEPS)} "
            f"phase={source.choice(PHASES[:4])}"
            for _ in range(source.randint(1, 3))
        ]
        yield plan, "; ".join(faults)


def attempt(plan: str, faults: str, right: Numbers) -> dict[str, Any]:
    """One run under faults, begun again by hand where a fault asked it to stop or was an error that comes before any step."""
    with tempfile.TemporaryDirectory() as name:
        folder, by_hand = Path(name), 0
        began = time.monotonic()
        while (ended := _run(plan, folder, faults if not by_hand else "")).state != "ok" and by_hand < 3:
            by_hand += 1
        took_s = round(time.monotonic() - began, 3)
        record: dict[str, Any] = {"plan": plan, "faults": faults, "state": ended.state, "seconds": took_s}
        events = list(read_json_lines(folder / "events.jsonl"))
        went = list(_recoveries(folder, events))
        record |= {"by_hand": by_hand, "restarts": len(went), "redone": [again for again, _ in went]}
        record["next_step_s"] = [round(seconds, 3) for _, seconds in went]
        same = ended.state == "ok" and numbers_of(folder) == right
        if not same:
            record["report"] = ended.report.splitlines()[:4]
        named = all(
            str(event["rank"])
            in {word.removeprefix("rank=") for word in faults.split() if word.startswith("rank=")}
            or "started the ranks" in event["message"]
            for event in events
            if event["event"] == "fault"
        )
        return record | {
            "same": same,
            "named": named,
            "right": same and named and max(record["redone"], default=0) <= 1,
        }


def _recoveries(folder: Path, events: list[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Of each restart: steps that were taken again, and seconds from the failure's report to the end of the next step."""
    ends = [row["time"] for row in read_json_lines(folder / "metrics.jsonl")]
    for number, event in enumerate(events):
        if event["event"] != "restart":
            continue
        begun = next((later for later in events[number:] if later["event"] == "start"), None)
        after = [end for end in ends if end > event["time"]]
        if begun is not None and after:
            yield max(0, event["step"] - begun["step"]), min(after) - event["time"]


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and times of all restarts."""
    seconds = sorted(value for record in records for value in record["next_step_s"])
    return {
        "runs": len(records),
        "right": sum(record["right"] for record in records),
        "same_numbers": sum(record["same"] for record in records),
        "right_rank_named": sum(record["named"] for record in records),
        "restarts": sum(record["restarts"] for record in records),
        "most_steps_redone": max((max(record["redone"], default=0) for record in records), default=0),
        "next_step_s": {"median": statistics.median(seconds), "most": seconds[-1]} if seconds else None,
    }


def numbers_of(folder: Path) -> Numbers:
    """What a run wrote down and saved."""
    steps = [tuple(row[key] for key in NUMBERS) for row in read_json_lines(folder / "metrics.jsonl")]
    saved = whole_tensors(one(folder / "checkpoints" / f"step-{STEPS:08d}"))
    return Numbers(steps, {name: tensor.numpy().tobytes() for name, tensor in saved})


def _undisturbed(plan: str) -> Numbers:
    with tempfile.TemporaryDirectory() as name:
        if _run(plan, Path(name), "").state != "ok":
            raise RuntimeError(f"{plan}: a run without faults failed")
        return numbers_of(Path(name))


def _run(plan: str, folder: Path, faults: str) -> Outcome:
    return launch(_settings(plan, folder, faults), _ranks(plan), device="cpu", quiet=True)


def _ranks(plan: str) -> int:
    ranks = 1
    for degree in PLANS[plan].values():
        ranks *= degree
    return ranks


def _settings(plan: str, folder: Path, faults: str) -> Settings:
    dims = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 300, "tied": False}
    said = {
        "model": dims,
        "data": {"source": "synthetic", "vocab": 300, "seq_len": 16, "eval_fraction": 0.0},
        "train": {"steps": STEPS, "global_batch": 4},
        "plan": {**PLANS[plan], "micro_batch": 1, "compile": False},
        "checkpoint": {"memory_every": 1},
        "run": {
            "dir": str(folder),
            "faults": faults,
            "deadline_s": DEADLINE_S,
            "threads": 1,
            "log_every": 1000,
        },
    }
    return make_ready(parse(said, where="faults"))


if __name__ == "__main__":
    sys.exit(main())
