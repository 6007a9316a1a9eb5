"""The same failures, done to the same small job under what people use today and under Shoal.

    python benchmarks/faults_peers.py --out DIR [--repeats 3] [--limit-s 90] [--total-s 3600] [--only TEXT] [--faults kill,...]

Systems: a plain script (faults_peers_ddp.py) under torchrun with --max-restarts 3, as torchrun shares its store between attempts
and as it does with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; the script under torchft (faults_peers_torchft.py), if that can be
imported; `shoal train`, begun by the command line and begun with torch imported ("warm"). All train two ranks of a transformer of
the same width and depth on this host and wait 8 s for a rank; the script and Shoal save every fifth step, and Shoal keeps its
state in memory, too, after every step.

Faults: of rank 1 when 12 steps are done: `kill` (SIGKILL), `stop` (SIGSTOP), `raise` (an exception). Of two machines with a rank
each: `agent` and `leading agent`, SIGKILL to the torchrun or `shoal train` of the one that does not lead and of the one that does
(torchrun: that has the store); `machine` and `leading machine`, SIGKILL to all that it has started as well. Who is killed from
outside is started again at once, as a node's manager would. `term`: SIGTERM to the launcher, or to both of torchft.

Of each: the longest wait for a step that had not been done before, from the fault on (`next_step_s`); null: the last step was
not done, since there was nothing new for --limit-s or all launchers had ended. Steps that were done again (`term`: that are not
in the newest checkpoint). Whether what launchers printed after it names who failed and of what in one line (the rule is `naming`
in faults_peers_judge.py; of a torchft replica: whether its own torchrun does; of a machine: its process or its rank). Processes
that are left 5 s after the end, or of a killed launcher 5 s after the kill. Whether the weights are those of an undisturbed run,
bit for bit.

All faults are done once to all systems before any is done again, so that a run that --total-s ends has fewer of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults_peers_jobs import DEADLINE_S, Ask, System, has_torchft, systems, weights
from benchmarks.faults_peers_judge import table
from benchmarks.faults_peers_watch import disturb
from shoal.observe.machine import facts, version_of
from shoal.run import write_whole

STEPS, LONG_STEPS, STRUCK_AFTER = 40, 200, 12
OF_RANKS = ("kill", "stop", "raise")
OF_MACHINES = ("agent", "leading agent", "machine", "leading machine")
FAULTS = (*OF_RANKS, "term", *OF_MACHINES)


def main() -> int:
    """Do all that there is time for, and write it down after each."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.total_s
    kept = _about(options) | {"runs": []}
    right: dict[tuple[str, int], str | None] = {}
    for repeat, system, fault in _order(options):
        if time.monotonic() > until:
            break
        # what goes on without some ranks must not be over before they are back
        steps = LONG_STEPS if "agent" in fault or system.family == "torchft" else STEPS
        key = (system.family, steps)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            if key not in right:
                right[key] = _undisturbed(system, steps)
            record = _record(system, fault, Ask(Path(name), steps), options.limit_s, right[key])
        kept["runs"].append({"repeat": repeat, **record})
        print(json.dumps(kept["runs"][-1]), flush=True)
        write_whole(options.out / "faults_peers.json", json.dumps(kept, indent=1) + "\n")
    print(table(kept["runs"]))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=90.0)
    parser.add_argument("--total-s", type=float, default=3600.0)
    parser.add_argument("--only", default="", help="systems whose name has this in it")
    parser.add_argument("--faults", default=",".join(FAULTS))
    return parser.parse_args()


def _about(options: argparse.Namespace) -> dict[str, Any]:
    words = f"--repeats {options.repeats} --limit-s {options.limit_s:g} --total-s {options.total_s:g}"
    words += f" --only '{options.only}'" if options.only else ""
    words += f" --faults '{options.faults}'" if options.faults != ",".join(FAULTS) else ""
    machine = facts()
    machine |= {"cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    machine["versions"]["torchft"] = version_of("torchft") if has_torchft() else None
    return {
        "command": f"python benchmarks/faults_peers.py --out DIR {words}",
        "machine": machine,
        "deadline_s": DEADLINE_S,
        "steps": {"agents and torchft": LONG_STEPS, "others": STEPS, "struck_after": STRUCK_AFTER},
    }


def _order(options: argparse.Namespace) -> Iterator[tuple[int, System, str]]:
    asked = options.faults.split(",")
    there = [system for system in systems() if options.only in system.name]
    for repeat in range(options.repeats):
        for fault in (fault for fault in FAULTS if fault in asked):
            for system in there:
                if fault in faults_of(system):
                    yield repeat, system, fault


def faults_of(system: System) -> tuple[str, ...]:
    """What is done to a system: none of torchft's replicas leads; machines are lost where torchrun can go on without them."""
    if system.family == "torchft":
        return (*OF_RANKS, "term", "machine")
    if system.nodes > 1:
        return OF_MACHINES[:2] if system.name == "torchrun, 2 nodes" else OF_MACHINES
    return (*OF_RANKS, "term")


def _undisturbed(system: System, steps: int) -> str | None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        disturb(system, Ask(folder, steps), "", STRUCK_AFTER, limit_s=60.0)
        return weights(folder, steps)


def _record(system: System, fault: str, ask: Ask, limit_s: float, right: str | None) -> dict[str, Any]:
    """One job that is disturbed."""
    inside = f"{fault} rank=1 step={STRUCK_AFTER}" if fault in OF_RANKS else ""
    found = disturb(system, ask._replace(fault=inside), fault, STRUCK_AFTER, limit_s=limit_s)
    record = {"system": system.name, "fault": fault, **found._asdict()}
    if fault == "term":  # it is not started again: what is not saved would be done again
        return record | {"redone": found.done - found.saved, "next_step_s": None, "same": None}
    return record | {"same": right is not None and weights(ask.folder, ask.steps) == right}


if __name__ == "__main__":
    sys.exit(main())
