r"""The script of faults_peers_ddp.py under torchft: each replica is one rank under a torchrun of its own, beside one lighthouse.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 --bind [::]:PORT
    TORCHFT_LIGHTHOUSE=http://HOST:PORT torchrun --nnodes 1 --nproc-per-node 1 --max-restarts 3 \
        benchmarks/faults_peers_torchft.py --dir DIR --steps 40 --replica 0

A replica that comes back gets its state from one that lives. For when none does, each saves every fifth step and loads that when
it starts. Each writes a line for a step that it commits.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults_peers_ddp import EVERY, Small, batch, loss_of, note, note_final, options, strike

REPLICAS = 2


def main() -> None:
    from torchft import (  # pyrefly: ignore [missing-import]
        DistributedDataParallel,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    asked = options()
    torch.manual_seed(0)
    small = Small()
    inner = torch.optim.AdamW(small.parameters(), lr=1e-3)

    def load_state(state: dict[str, Any]) -> None:
        small.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def get_state() -> dict[str, Any]:
        return {"model": small.state_dict(), "optimizer": inner.state_dict()}

    limit = timedelta(seconds=asked.deadline_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=get_state,
        replica_id=f"replica_{asked.replica}",
        timeout=limit,
        hostname="127.0.0.1",
    )
    save = asked.dir / "saves" / f"replica_{asked.replica}.pt"
    if save.exists():
        state = torch.load(save)
        load_state(state)
        manager.load_state_dict(state["manager"])
    wait_for_all(asked.dir, asked.replica)
    model, optimizer = DistributedDataParallel(manager, small), Optimizer(manager, inner)
    while (step := manager.current_step()) < asked.steps:
        strike(asked.dir, asked.fault, step, asked.replica)
        optimizer.zero_grad()
        loss_of(model, batch(step, asked.replica)).backward()
        optimizer.step()
        if manager.current_step() > step:
            note(asked.dir, manager.current_step(), asked.replica)
            if manager.current_step() % EVERY == 0:
                save_to(save, {**get_state(), "manager": manager.state_dict()})
    if asked.replica == 0:
        note_final(asked.dir, small)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads wait for peers that have gone


def save_to(path: Path, state: dict[str, Any]) -> None:
    """Write a file aside, and then let it take the place of the one before."""
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def wait_for_all(folder: Path, replica: int) -> None:
    """Until all replicas are known to the lighthouse, or have been, so that an undisturbed run has both in every step."""
    (folder / f"replica_{replica}").touch()
    while len([*folder.glob("replica_*")]) < REPLICAS:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
