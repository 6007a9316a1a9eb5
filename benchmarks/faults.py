"""A campaign of failures: whatever is done to a run, it ends by itself with the numbers of a run that nothing disturbed.

    python benchmarks/faults.py --out DIR [--singles 200] [--schedules 500] [--seed 0] [--total-s 7200] [--only machines]

Singles are one failure each: every kind, on every rank, in every phase, in turn. Schedules are one to three failures that
a seed draws. Runs are on one machine and on two and three, each of which is a process of this host, as root with a network of its
own. Each is compared with an undisturbed one of its plan: losses, norms, rates and tokens of all steps, and every tensor of the
last checkpoint, bit for bit (after `memory`, which halves micro-batches, losses and norms to 1e-5). DIR/faults.json has a line a
run; the command ends with 1 if one differs, names another rank than the one that failed, took more than one step again, or left a
process behind.

Launches begin with torch imported (as those of the tests do): what is measured is a run that goes on, and not how Python starts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import faults_machines as machines
from benchmarks.faults_judge import is_right, kinds_of
from shoal.checkpoint.check import one
from shoal.checkpoint.plain import whole_tensors
from shoal.config import Settings, parse
from shoal.launch.local import Outcome, launch
from shoal.launch.ranks import Ranks
from shoal.launch.ready import make_ready
from shoal.observe.machine import facts
from shoal.resilience.faults import ALL_KINDS, DRAWN, FLIP, LOADER, NODE, PHASES, STRUCK
from shoal.run import read_json_lines, write_whole
from tests.launch.networks import Networks, can_make_networks, networks
from tests.launch.warm import start

STEPS = 6
SAMPLES = 24  # a step, in two micro-batches a rank
DEADLINE_S = 4.0  # after which a hang is found
WAITED_FOR = ("hang", "stop", "extra", "cut", "halt", "blip", "slow")
"""kinds that are found by waiting, or that last"""
PLANS: dict[str, dict[str, Any]] = {
    "shard 2": {"shard": 2},
    "replicate 2": {"replicate": 2},
    "replicate 3": {"replicate": 3},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
    "2 machines, replicate 2": {"replicate": 2},
    "2 machines, replicate 2 x tensor 2": {"replicate": 2, "tensor": 2},
    "3 machines, replicate 3": {"replicate": 3},
}
CLOSE = 1e-5  # of losses and norms in fp32
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
    with patch.object(Ranks, "start", start), ExitStack() as stack:
        nets = stack.enter_context(networks(3)) if can_make_networks() else None
        for plan, faults in [
            *singles(options.singles, options.seed, options.only),
            *list(schedules(options.schedules, options.seed, options.only))[options.skip :],
        ]:
            if time.monotonic() > until:
                break
            if nets is None and ("cut " in faults or "blip " in faults):
                continue  # there is no cable
            if plan not in right:
                right[plan] = _undisturbed(plan, nets)
            records.append(attempt(plan, faults, right[plan], nets))
            if not records[-1]["right"]:
                print(json.dumps(records[-1]), flush=True)
    counts = f"--singles {options.singles} --schedules {options.schedules} --seed {options.seed}"
    counts += f" --skip {options.skip}" if options.skip else ""
    counts += f" --only {options.only}" if options.only else ""
    found = {"command": f"python benchmarks/faults.py --out DIR {counts}", "machine": facts()}
    found["networks"] = "one a machine" if nets is not None else "the loopback"
    kept = found | {"summary": summary(records), "runs": records}
    write_whole(options.out / "faults.json", json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept["summary"], indent=1))
    return int(not all(record["right"] for record in records))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--singles", type=int, default=200)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--skip", type=int, default=0, help="of the schedules, the first ones, run before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-s", type=float, default=7200.0)
    parser.add_argument("--only", default="", help="plans whose name has this in it")
    return parser.parse_args()


def singles(count: int, seed: int, only: str = "") -> Iterator[tuple[str, str]]:
    """(plan, faults): every kind in every phase on every rank, in an order that a seed shuffles."""
    kinds = [kind for kind in ALL_KINDS if kind not in ("slow", FLIP, LOADER)]
    plans = [plan for plan in PLANS if only in plan]
    every = [
        (plan, f"{kind} rank={rank} step={1 + number % (STEPS - 2)} phase={phase}")
        for number, (plan, kind, phase) in enumerate(product(plans, kinds, PHASES[:4]))
        for rank in range(_ranks(plan))
        if kind != NODE or machines_of(plan)
    ]
    every += [
        (plan, f"{kind} node={node} step={step}")
        for plan, kind, step in product(plans, machines.KINDS, range(1, STEPS - 1))
        for node in range(1, 1 + machines_of(plan))
    ]
    random.Random(seed).shuffle(every)
    yield from every[:count]


def schedules(count: int, seed: int, only: str = "") -> Iterator[tuple[str, str]]:
    """(plan, faults): one to three faults."""
    source = random.Random(f"schedules {seed}")
    for _ in range(count):
        plan = source.choice([plan for plan in PLANS if only in plan])
        yield plan, "; ".join(_drawn(source, plan) for _ in range(source.randint(1, 3)))


def _drawn(source: random.Random, plan: str) -> str:
    nodes = machines_of(plan)
    kind = source.choice([*DRAWN, NODE, *machines.KINDS] if nodes else DRAWN)
    if kind in machines.KINDS:
        return f"{kind} node={source.randint(1, nodes)} step={source.randrange(1, STEPS)}"
    rank, step, phase = source.randrange(_ranks(plan)), source.randrange(STEPS), source.choice(PHASES[:4])
    return f"{kind} rank={rank} step={step} phase={phase}"


def machines_of(plan: str) -> int:
    """Machines of a plan; 0: it is on one, without run.nodes."""
    return int(plan[0]) if "machines" in plan else 0


def attempt(plan: str, faults: str, right: Numbers, nets: Networks | None) -> dict[str, Any]:
    """One run under faults, begun again by hand where a fault asked it to stop or was an error that comes before any step."""
    with tempfile.TemporaryDirectory() as name:
        folder, by_hand = Path(name), 0
        hit: list[machines.Hit] = []
        began = time.monotonic()
        while (
            ended := _run(plan, folder, faults if not by_hand else "", nets, hit)
        ).state != "ok" and by_hand < 3:
            by_hand += 1
        took_s = round(time.monotonic() - began, 3)
        record: dict[str, Any] = {"plan": plan, "faults": faults, "state": ended.state, "seconds": took_s}
        events = list(read_json_lines(folder / "events.jsonl"))
        record |= {"by_hand": by_hand, "restarts": sum(event["event"] == "restart" for event in events)}
        record["redone"] = list(_redone(folder, events))
        record["next_step_s"] = {} if by_hand else dict(_recoveries(folder, faults))
        record["left"] = _left_processes(folder)
        same = ended.state == "ok" and is_same(numbers_of(folder), right, exact="memory " not in faults)
        if not same:
            record["report"] = ended.report.splitlines()[:4]
        struck = kinds_of(faults, [what for what, _ in _marks(folder)])
        named = is_right(faults, events, struck, hit)
        if not named:
            record["told"] = [event["message"] for event in events if event["event"] == "fault"]
        return record | {
            "same": same,
            "named": named,
            "right": same and named and max(record["redone"], default=0) <= 1 and not record["left"],
        }


def _redone(folder: Path, events: list[dict[str, Any]]) -> Iterator[int]:
    """Steps that were taken again after each restart: that all ranks had done when they failed."""
    for number, event in enumerate(events):
        begun = next((later for later in events[number:] if later["event"] == "start"), None)
        if event["event"] == "restart" and begun is not None:
            yield max(0, event["step"] - begun["step"])


def _recoveries(folder: Path, faults: str) -> Iterator[tuple[str, float]]:
    """Of each failure that struck and was the last to before a step: its kind, and seconds from it to the end of that step."""
    ends = [row["time"] for row in read_json_lines(folder / "metrics.jsonl")]
    marks = _marks(folder)
    kinds, times = kinds_of(faults, [what for what, _ in marks]), [when for _, when in marks]
    for number, (kind, when) in enumerate(zip(kinds, times, strict=True)):
        after = [end for end in ends if end > when]
        following = times[number + 1] if number + 1 < len(times) else float("inf")
        if after and min(after) < following:
            yield kind, round(min(after) - when, 3)


def _marks(folder: Path) -> list[tuple[str, float]]:
    """What struck, and when."""
    with suppress(FileNotFoundError):
        lines = (folder / "ranks" / STRUCK).read_text().splitlines()
        return [(what, float(when)) for what, when in map(str.split, lines)]
    return []


def _left_processes(folder: Path) -> list[str]:
    """Processes of a run that should be gone: those that have a file of it open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(folder) in str(link.readlink()) for link in (process / "fd").iterdir()):
                found.append((process / "cmdline").read_text().replace("\0", " ")[:80])
    return found


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and times of all restarts."""
    kinds: dict[str, list[float]] = {}
    for record in records:
        for kind, value in record["next_step_s"].items():
            kinds.setdefault(kind, []).append(value)
    at_once = sorted(value for kind, values in kinds.items() if kind not in WAITED_FOR for value in values)
    return {
        "runs": len(records),
        "right": sum(record["right"] for record in records),
        "same_numbers": sum(record["same"] for record in records),
        "right_rank_named": sum(record["named"] for record in records),
        "restarts": sum(record["restarts"] for record in records),
        "most_steps_redone": max((max(record["redone"], default=0) for record in records), default=0),
        "processes_left": sum(bool(record["left"]) for record in records),
        "next_step_s": {"median": statistics.median(at_once), "most": at_once[-1]} if at_once else None,
        "median_next_step_s_by_kind": {
            kind: round(statistics.median(v), 3) for kind, v in sorted(kinds.items())
        },
    }


def is_same(found: Numbers, right: Numbers, *, exact: bool) -> bool:
    """Bit for bit; or, for a run whose micro-batches were halved, up to the rounding of sums in another order."""
    if exact:
        return found == right
    close = [
        math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE)
        for mine, theirs in zip(found.steps, right.steps, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return all(close) and found.tensors.keys() == right.tensors.keys()


def numbers_of(folder: Path) -> Numbers:
    """What a run wrote down and saved."""
    steps = [tuple(row[key] for key in NUMBERS) for row in read_json_lines(folder / "metrics.jsonl")]
    saved = whole_tensors(one(folder / "checkpoints" / f"step-{STEPS:08d}"))
    return Numbers(steps, {name: tensor.numpy().tobytes() for name, tensor in saved})


def _undisturbed(plan: str, nets: Networks | None) -> Numbers:
    with tempfile.TemporaryDirectory() as name:
        if _run(plan, Path(name), "", nets, []).state != "ok":
            raise RuntimeError(f"{plan}: a run without faults failed")
        return numbers_of(Path(name))


def _run(plan: str, folder: Path, faults: str, nets: Networks | None, hit: list[machines.Hit]) -> Outcome:
    if count := machines_of(plan):
        return machines.run_on_machines(_settings(plan, folder, ""), count, faults, nets, hit)
    return launch(_settings(plan, folder, faults), _ranks(plan), device="cpu", quiet=True)


def _ranks(plan: str) -> int:
    ranks = 1
    for degree in PLANS[plan].values():
        ranks *= degree
    return ranks


def _settings(plan: str, folder: Path, faults: str) -> Settings:
    dims = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 300, "tied": False}
    degrees = PLANS[plan]
    micro_batch = SAMPLES // (degrees.get("replicate", 1) * degrees.get("shard", 1)) // 2
    said = {
        "model": dims,
        "data": {"source": "synthetic", "vocab": 300, "seq_len": 16, "eval_fraction": 0.0},
        "train": {"steps": STEPS, "global_batch": SAMPLES},
        "plan": {**PLANS[plan], "micro_batch": micro_batch, "compile": False},
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
