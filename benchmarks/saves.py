"""What a save costs a run that goes on: how long ranks are held up, how fast it is written and loaded, what a kill costs.

    python benchmarks/saves.py --out FILE [--device cpu|cuda] [--ranks 1] [--preset 433m] [--batch 64] [--micro-batch 8]
                               [--seq-len 2048] [--every 10] [--saves 2] [--eager] [--threads N] [--folder DIR]
                               [--parts asynchronous,synchronous,in_memory] [--layers N]

Three runs of `shoal train`: one with an asynchronous save every so many steps, of which a rank is killed in the middle; one whose
saves are not asynchronous and which gets a SIGTERM, after which its last checkpoint is loaded by one process; one that keeps its
state in memory after every step, of which a rank is killed. Shares are of a step, and a step is the median before the first save.
The first asynchronous save plans and makes its memory; it is told by itself. FILE is written after each run.

`--saves 1` is for a state of which the disk holds one. The first run's second save then finds the disk full, the rank is killed
after it, and the run ends without a save of its own; the second run gets its SIGTERM before the first save is due, and what it
left is not loaded: the kill has that of the first run loaded by all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shoal.config import Settings, parse
from shoal.launch.local import launch
from shoal.launch.ready import make_ready
from shoal.observe.machine import facts
from shoal.observe.status import RankStatus
from shoal.plan import Plan
from shoal.run import Run, read_json_lines, write_whole

WARM = 3  # steps that are not counted: memory and kernels come to rest
VOCAB = 128_256
PARTS = ("asynchronous", "synchronous", "in_memory")
BIG = ("433m", "1b", "3b", "8b")


def main() -> int:
    """Run both and write the figures; 1 if one failed."""
    options = _options()
    found: dict[str, Any] = {"command": f"python benchmarks/saves.py {shlex.join(sys.argv[1:])}"}
    found |= {"machine": facts(), "preset": options.preset, "ranks": options.ranks}
    found |= {"tokens_a_step": options.batch * options.seq_len, "every": options.every}
    problems = 0
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as folder:
        known = {part.__name__: part for part in (asynchronous, synchronous, in_memory)}
        for name in options.parts:
            part = known[name]
            try:
                found[name] = part(Path(folder) / name, options)
            except Exception as error:  # the other part's figures are of use by themselves
                found[name], problems = {"problem": f"{type(error).__name__}: {error}"}, problems + 1
            _clear(Path(folder) / name)
            write_whole(options.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(problems > 0)


def asynchronous(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Some saves and the last; a rank is killed half way between them."""
    every, last = options.every, options.saves * options.every
    kept = {"every": every, "last": options.saves > 1}
    killed = last + (every // 2 if options.saves > 1 else every + 2)
    end = last + (every if options.saves > 1 else every + 4)
    with _watched(folder) as seen:
        _train(folder, options, steps=end, faults=f"kill rank=0 step={killed}", checkpoint=kept)
    rows, events = _firsts(seen.values()), list(read_json_lines(folder / "events.jsonl"))
    saves = [event for event in events if event["event"] == "save" and event["step"] <= last]
    step_s = _step_s(rows, every)
    size = _size(folder)
    whole = [rows[step]["time"] - rows[step - every]["time"] for step in range(2 * every, last + 1, every)]
    found = _saves(saves, step_s, size) | {
        "first_stall_s": saves[0]["stall_s"],
        "more_than_steps_alone_s": [round(seconds - every * step_s, 4) for seconds in whole],
        "waited_s": [event["seconds"] for event in events if event["event"] == "save waited"],
        "steps_after_s": [rows[event["step"] + 1]["seconds"] for event in saves],
    }
    if options.saves == 1:
        found |= {
            "steps_s": {step: row["seconds"] for step, row in sorted(rows.items())},
            "not_saved": [event["reason"] for event in events if event["event"] == "save failed"],
        }
    return found | _after_kill(seen, events) | _loaded(events, size)


def synchronous(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One save, then a SIGTERM, and what it left is loaded."""
    every, asked = options.every, []

    def ask() -> None:
        while len(_rows(folder)) < (every + 2 if options.saves > 1 else every - 3):
            time.sleep(0.02)
        asked.append(time.time())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    settings = _train(folder, options, steps=100 * every, asynchronous=False)
    events = list(read_json_lines(folder / "events.jsonl"))
    saves = [event for event in events if event["event"] == "save"]
    size = _size(folder)
    found = _saves(saves[:1], _step_s(_rows(folder), min(every, saves[0]["step"])), size)
    found["sigterm_to_durable_s"] = round(saves[-1]["time"] - asked[0], 3)
    if options.saves > 1:
        found["load"] = _rate(load_seconds(settings, options.device), size)
    return found


def in_memory(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """No save to the disk, but each rank's part is copied after every step; the last rank is killed."""
    every, rank = options.every, options.ranks - 1
    kept = {"every": 0, "memory_every": 1, "last": False}
    with _watched(folder) as seen:
        _train(folder, options, steps=2 * every, faults=f"kill rank={rank} step={every + 2}", checkpoint=kept)
    events = list(read_json_lines(folder / "events.jsonl"))
    return {"step_s": round(_step_s(_firsts(seen.values()), every), 4)} | _after_kill(seen, events)


@contextmanager
def _watched(folder: Path) -> Generator[dict[float, dict[str, Any]]]:
    """Rows by the time they were written, also those that a kill takes away since their steps are taken again."""
    seen: dict[float, dict[str, Any]] = {}
    done = threading.Event()

    def read() -> None:
        seen.update((row["time"], row) for row in read_json_lines(folder / "metrics.jsonl"))

    def look() -> None:
        while not done.wait(0.02):
            read()

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield seen
    finally:
        done.set()
        watch.join()
        read()


def _after_kill(times: Iterable[float], events: list[dict[str, Any]]) -> dict[str, Any]:
    """From the last step before the kill, and from its report, to the first after it."""
    fault = next(event for event in events if event["event"] == "fault")
    after = min(time for time in times if time > fault["time"])
    before = max(time for time in times if time < fault["time"])
    return {
        "kill_to_next_step_s": round(after - before, 3),
        "report_to_next_step_s": round(after - fault["time"], 3),
    }


def _loaded(events: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """What the ranks that were started again loaded from the disk."""
    loads = [event["load_s"] for event in events if event["event"] == "start" and "load_s" in event]
    return {"load_after_kill": _rate(loads[-1], size)} if loads else {}


def _rate(seconds: float, size: int) -> dict[str, float]:
    return {"seconds": round(seconds, 3), "gb_per_s": round(size / seconds / 1e9, 2)}


def load_seconds(settings: Settings, device: str) -> float:
    """How long one process takes to load the newest checkpoint, every byte checked."""
    import torch

    from shoal.checkpoint.store import load, newest
    from shoal.train.setup import set_up
    from shoal.world import join_world

    run, alone = Run(Path(settings.run.dir)), settings.with_plan(Plan(compile=False))
    with join_world(rank=0, size=1, device=device) as world:
        state = set_up(alone, world, run, RankStatus(None, 0)).state()
        checkpoint, _ = newest(run.checkpoints, world)
        assert checkpoint is not None
        began = time.perf_counter()
        load(checkpoint, state, world, rest=True)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def _train(folder: Path, options: argparse.Namespace, *, steps: int, **said: Any) -> Settings:
    faults = said.get("faults", "")
    kept = said.get("checkpoint", {"every": options.every, "asynchronous": said.get("asynchronous", True)})
    big = options.preset in BIG
    table = {
        "model": {"preset": options.preset} | ({"layers": options.layers} if options.layers else {}),
        "data": {
            "source": "synthetic",
            "vocab": VOCAB if big else 4096,
            "seq_len": options.seq_len,
            "eval_fraction": 0.0,
        },
        "train": {"steps": steps, "global_batch": options.batch, "precision": "bf16" if big else "fp32"},
        "optimizer": {"lr": 1e-4, "schedule": "constant"},
        "plan": {
            "shard": options.ranks,
            "micro_batch": options.micro_batch,
            "compile": options.device == "cuda" and not options.eager,
        },
        "checkpoint": kept,
        "run": {"dir": str(folder), "faults": faults, "log_every": 1, "threads": options.threads},
    }
    settings = make_ready(parse(table, where="saves"))
    outcome = launch(settings, options.ranks, device=options.device)
    if outcome.state == "failed":
        raise RuntimeError(outcome.report)
    return settings


def _saves(saves: list[dict[str, Any]], step_s: float, size: int) -> dict[str, Any]:
    """Of saves after the first, or of the only one."""
    counted = saves[1:] or saves
    stalls, written = ([save[key] for save in counted] for key in ("stall_s", "seconds"))
    return {
        "step_s": round(step_s, 4),
        "bytes": size,
        "stall_s": stalls,
        "share_of_a_step": round(statistics.median(stalls) / step_s, 4),
        "durable_s": written,
        "gb_per_s": round(size / statistics.median(written) / 1e9, 2),
    }


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    return _firsts(read_json_lines(folder / "metrics.jsonl"))


def _firsts(rows: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each step the first row: after a kill some are taken again."""
    firsts: dict[int, dict[str, Any]] = {}
    for row in rows:
        firsts.setdefault(row["step"], row)
    return firsts


def _step_s(rows: dict[int, dict[str, Any]], every: int) -> float:
    return statistics.median(rows[step]["seconds"] for step in range(WARM + 1, every + 1))


def _size(folder: Path) -> int:
    newest = max((folder / "checkpoints").glob("step-*"))
    return sum(path.stat().st_size for path in newest.iterdir())


def _clear(folder: Path) -> None:
    """The next run's checkpoints may need the room."""
    for path in (folder / "checkpoints").rglob("*.bin"):
        path.unlink()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file of the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--preset", default="433m")
    parser.add_argument("--layers", type=int, help="other than the preset's")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--eager", action="store_true", help="without the compiler")
    parser.add_argument("--threads", type=int, help="CPU threads a rank; left out: cores / ranks")
    parser.add_argument("--folder", type=Path, help="where to write; left out: the system's temporary folder")
    options = parser.parse_args()
    if options.every < WARM + 4:
        parser.error(
            f"--every {options.every}: steps before a save are timed and stopped at; take {WARM + 4} or more"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
