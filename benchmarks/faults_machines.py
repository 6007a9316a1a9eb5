"""The part of the campaign (faults.py) on several machines: each a process, with a network of its own if that can be made."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config import Settings
from shoal.launch.after import Outcome
from tests.launch.machines import Machine, steps_of
from tests.launch.networks import Networks

ENDS_S = 120.0
CUT_S, BLIP_S, HALT_S = 9.0, 1.0, 7.0  # a machine is lost after NODE_DEADLINE_S
NODE_DEADLINE_S = 3.0
KINDS = ("lead", "cut", "blip", "halt")
"""done to a machine from outside: who leads is killed; a cable is pulled for long, or shortly; its launcher stands still"""


class Blow(NamedTuple):
    """Something that is done to a machine when so many steps are done."""

    kind: str
    node: int
    step: int


class Hit(NamedTuple):
    """What was done to a machine from outside, and its process then."""

    kind: str
    pid: int


def read_blows(text: str) -> tuple[str, list[Blow]]:
    """Faults of ranks, as `run.faults` takes them, and what is done to machines, such as `cut node=1 step=3`.

    Example:
        >>> read_blows("kill rank=0 step=2; cut node=1 step=3")
        ('kill rank=0 step=2', [Blow(kind='cut', node=1, step=3)])
    """
    ours, blows = [], []
    for part in filter(None, map(str.strip, text.split(";"))):
        kind, *words = part.split()
        if kind in KINDS:
            keys = dict(word.split("=") for word in words)
            blows.append(Blow(kind, int(keys["node"]), int(keys["step"])))
        else:
            ours.append(part)
    return "; ".join(ours), blows


def run_on_machines(
    settings: Settings, count: int, faults: str, networks: Networks | None, hit: list[Hit]
) -> Outcome:
    """A run on so many machines. One that is killed is started again at once, as a node's manager would.

    Args:
        hit: gets what was done to machines from outside.
    """
    folder = Path(settings.run.dir)
    ours, blows = read_blows(faults)
    about: dict[str, Any] = {
        "faults": ours,
        "nodes": str(count),
        "node_deadline_s": NODE_DEADLINE_S,
        "nodes_wait_s": 60.0,
    }
    about["interface"] = "lo" if networks is None else None
    settings = settings.model_copy(update={"run": settings.run.model_copy(update=about)})

    def start(number: int) -> Machine:
        return Machine(settings, namespace=networks.namespace(number) if networks is not None else None)

    machines = {number: start(number) for number in range(1, count + 1)}
    over = threading.Event()
    hand = threading.Thread(
        target=_strike_all, args=(blows, folder, machines, networks, over, hit), daemon=True
    )
    hand.start()
    ends: dict[int, str] = {}
    until = time.monotonic() + ENDS_S
    try:
        while len(ends) < count and time.monotonic() < until:
            for number, machine in list(machines.items()):
                if number in ends or machine.process.is_alive():
                    continue
                said = machine.end()
                if said is None:
                    machines[number] = start(number)
                else:
                    ends[number] = said
            time.sleep(0.02)
    finally:
        over.set()
        hand.join()
        with ExitStack() as stack:
            for machine in machines.values():
                stack.enter_context(machine)
    told = "\n".join(machine.output.read_text()[-1500:] for machine in machines.values())
    if len(ends) < count:
        return Outcome("failed", 0, f"not at its end after {ENDS_S:g} s\n{told}")
    states = set(ends.values())
    if states <= {"ok"}:
        return Outcome("ok", max(steps_of(folder), default=0))
    return Outcome("interrupted" if states <= {"ok", "interrupted"} else "failed", 0, told)


def _strike_all(
    blows: list[Blow],
    folder: Path,
    machines: dict[int, Machine],
    networks: Networks | None,
    over: threading.Event,
    hit: list[Hit],
) -> None:
    for blow in sorted(blows, key=lambda blow: blow.step):
        while max(steps_of(folder), default=0) < blow.step:
            if over.wait(0.01):
                return
        with (folder / "ranks" / "faults.struck").open("a") as file:
            file.write(f"{blow.kind} {time.time():.3f}\n")
        _strike(blow, folder, machines, networks, over, hit)


def _strike(
    blow: Blow,
    folder: Path,
    machines: dict[int, Machine],
    networks: Networks | None,
    over: threading.Event,
    hit: list[Hit],
) -> None:
    if blow.kind == "lead":
        leader = sorted((folder / "epochs").glob("????????.json"))[-1].read_text()
        for machine in machines.values():
            if f"process {machine.pid})" in leader:
                hit.append(Hit(blow.kind, machine.pid))
                machine.send(signal.SIGKILL)
    elif blow.kind == "halt":
        machine = machines[blow.node]
        hit.append(Hit(blow.kind, machine.pid))
        with suppress(ProcessLookupError):
            machine.send(signal.SIGSTOP)
            over.wait(HALT_S)
            machine.send(signal.SIGCONT)
    elif networks is not None:
        hit.append(Hit(blow.kind, machines[blow.node].pid))
        networks.plug(blow.node, into=False)
        over.wait(CUT_S if blow.kind == "cut" else BLIP_S)
        networks.plug(blow.node, into=True)
