"""A plain script for torchrun that saves as it goes and loads the newest save when it starts: what faults_peers.py disturbs.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 benchmarks/faults_peers_ddp.py --dir DIR --steps 40

DistributedDataParallel on Gloo; torch.distributed.checkpoint after every fifth step, each into a folder of its own.
DIR/steps.jsonl has a line a step by rank 0, DIR/final.json a hash of the weights. With `--fault "kill rank=1 step=12"` that rank
strikes itself, once, when so many steps are done, and DIR/struck says when.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

VOCAB, DIM, LAYERS, HEADS, FFN = 300, 128, 2, 2, 384
SEQ_LEN, BATCH = 64, 8  # of a rank
EVERY = 5  # steps between saves
RAISED = "an exception on purpose"


class Small(nn.Module):
    """A transformer of some hundred thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)  # (B, T, D)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--deadline-s", type=float, default=8.0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--replica", type=int, default=0, help="for torchft")
    return parser.parse_args()


def batch(step: int, rank: int) -> Tensor:
    """Tokens of a step, the same whenever it is taken: (B, T + 1)."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=source)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def strike(folder: Path, fault: str, step: int, rank: int) -> None:
    """Do to this process what `fault` says, if it is its turn."""
    struck = folder / "struck"
    kind, *words = fault.split() or [""]
    if words != [f"rank={rank}", f"step={step}"] or struck.exists():
        return
    struck.write_text(f"{time.time():.3f}\n")
    if kind == "raise":
        raise RuntimeError(RAISED)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def note(folder: Path, step: int, who: int) -> None:
    """Write down that a step is done."""
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": round(time.time(), 3), "who": who}) + "\n")


def note_final(folder: Path, model: nn.Module) -> None:
    sums = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sums.update(name.encode() + tensor.numpy().tobytes())
    (folder / "final.json").write_text(json.dumps({"weights": sums.hexdigest()}))


def newest(folder: Path) -> int:
    """The step of the newest save that is whole; 0: none is."""
    return max((int(path.parent.name) for path in folder.glob("saves/*/.metadata")), default=0)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "saves" / str(step))


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest save; returns how many steps are done."""
    done = newest(folder)
    if done:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folder / "saves" / str(done))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return done


def main() -> None:
    asked = options()
    dist.init_process_group("gloo", timeout=timedelta(seconds=asked.deadline_s))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(load(asked.dir, model, optimizer), asked.steps):
        strike(asked.dir, asked.fault, step, rank)
        optimizer.zero_grad()
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        if rank == 0:
            note(asked.dir, step + 1, rank)
        if (step + 1) % EVERY == 0:
            save(asked.dir, step + 1, model, optimizer)
    if rank == 0:
        note_final(asked.dir, model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
