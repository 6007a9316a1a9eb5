"""What every peer shares: joining, the batches that the product reads, timing, and the line of results."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.setting import Setting, read_setting
from shoal.data.batches import batches, open_dataset
from shoal.observe.machine import version_of
from shoal.plan import Plan

GIB = 1024**3
MicroBatch = tuple[Tensor, Tensor]
"""(tokens, labels), both (B, T)"""
Train = Callable[[list[MicroBatch]], Tensor]
"""One optimizer step over this rank's micro-batches, to its mean loss"""
Options = Mapping[str, tuple[str, ...]]
"""A peer's options and their values, the default first"""
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "megatron-core", "torchtitan", "torchao")


class Peer(NamedTuple):
    """One rank of a peer."""

    rank: int
    size: int
    device: torch.device
    setting: Setting
    options: dict[str, str]

    @property
    def compute(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.setting.job.train.precision]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


class Place(NamedTuple):
    """Who reads which part of a batch; of several ranks that share one, each has the same."""

    rank: int
    size: int


def read_arguments(options: Options | None = None) -> Peer:
    """This rank as torchrun started it; the process group is for the peer to make."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="job file")
    parser.add_argument("--steps", type=int, default=20, help="that are counted")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    for name, values in (options or {}).items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    given = vars(parser.parse_args())
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    setting = read_setting(given["job"], size, given["steps"], given["warmup"])
    return Peer(rank, size, device, setting, {name: given[name] for name in options or {}})


def join(peer: Peer) -> None:
    """Make the process group."""
    dist.init_process_group("nccl" if peer.on_gpu else "gloo", device_id=peer.device if peer.on_gpu else None)


def recomputes(peer: Peer, state_bytes: float, kept: float = 1.0) -> bool:
    """Whether blocks are to be computed again in backward: as the option says, else if they would not fit.

    Args:
        state_bytes: what parameters, gradients and optimizer state take of a GPU. kept: as for `fits`.
    """
    said = peer.options["recompute"]
    return said == "full" or (said == "auto" and not fits(peer, state_bytes, kept))


def kept_gathered(peer: Peer) -> str:
    """What a row says of the option."""
    return ", parameters kept gathered" if peer.options["reshard"] == "never" else ""


def fits(peer: Peer, state_bytes: float, kept: float = 1.0) -> bool:
    """Whether states and what forward keeps fit into 85 % of this GPU; more makes its allocator slow.

    Args:
        kept: the part of `activation_bytes` that this peer keeps.
    """
    if not peer.on_gpu:
        return True
    room = 0.85 * torch.cuda.get_device_properties(peer.device).total_memory
    return state_bytes + kept * activation_bytes(peer.setting) < room


def activation_bytes(setting: Setting) -> float:
    """About what a micro-batch keeps for backward, in bf16: inputs of matrix multiplications, and logits with theirs."""
    dims = setting.dims
    block = 8 * dims.dim + 2 * (dims.heads + 2 * dims.kv_heads) * dims.head_dim + 4 * dims.ffn
    per_token = 2 * dims.layers * block + (2 + 8) * dims.vocab
    return setting.micro_batch * setting.job.data.seq_len * per_token


def adamw(model: nn.Module, peer: Peer) -> torch.optim.AdamW:
    """torch's fused AdamW as the job says; matrices decay, vectors do not."""
    settings = peer.setting.job.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def measure(train: Train, peer: Peer, *, place: Place | None = None, says: str = "") -> None:
    """Take the warm-up's and the counted steps; rank 0 prints a line of JSON.

    Args:
        place: of ranks that share batches; left out: each rank has its own.
        says: what the setting chose by itself.
    """
    setting = peer.setting
    data = load_batches(peer, setting.warmup + setting.steps, place or Place(peer.rank, peer.size))
    if peer.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    seconds, losses = timed(train, data, peer)
    end = time.time()
    allocated, reserved = most_memory(peer)
    if peer.rank == 0:
        result = {
            "seconds": seconds[setting.warmup :],
            "losses": losses,
            "allocated_gib": allocated,
            "reserved_gib": reserved,
            "window": (end - sum(seconds[setting.warmup :]), end),
            "says": says,
            "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def load_batches(peer: Peer, steps: int, place: Place) -> list[list[MicroBatch]]:
    """This rank's micro-batches of all steps, on the device before the clock runs: the samples that the product takes."""
    setting = peer.setting
    plan = Plan(replicate=place.size, micro_batch=setting.micro_batch)
    dataset = open_dataset(setting.job.data, setting.job.train.seed, setting.data).train

    def on_device(data: dict[str, Tensor]) -> MicroBatch:
        return data["tokens"].to(peer.device), data["labels"].to(peer.device)

    taken = batches(dataset, setting.job, plan, place, stop=steps)
    return [[on_device(micro.data) for micro in batch.micro_batches] for batch in taken]


class Reading:
    """A step's loss over all ranks, on its way to the host; reading it waits for that step alone."""

    def __init__(self, loss: Tensor, size: int) -> None:
        loss = loss.detach().float().clone()
        dist.all_reduce(loss)
        loss /= size
        self._ready = torch.cuda.Event() if loss.is_cuda else None
        self._value = loss
        if self._ready is not None:
            self._value = torch.empty((), pin_memory=True).copy_(loss, non_blocking=True)
            self._ready.record()

    def value(self) -> float:
        if self._ready is not None:
            self._ready.synchronize()
        return self._value.item()


def timed(train: Train, data: list[list[MicroBatch]], peer: Peer) -> tuple[list[float], list[float]]:
    """Seconds between the ends of steps, and losses. On a GPU one step is always under way, as in a real loop."""
    unread: list[Reading] = []
    seconds, losses, last = [], [], time.perf_counter()

    def read(leave: int) -> None:
        nonlocal last
        while len(unread) > leave:
            losses.append(unread.pop(0).value())
            now = time.perf_counter()
            seconds.append(now - last)
            last = now

    for batch in data:
        unread.append(Reading(train(batch), peer.size))
        read(leave=int(peer.on_gpu))
    read(leave=0)
    return seconds, losses


def most_memory(peer: Peer) -> tuple[float | None, float | None]:
    """Peak allocated and reserved GiB, the most over the ranks; None without a GPU. Collective."""
    if not peer.on_gpu:
        return None, None
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    most = torch.tensor(peaks, dtype=torch.float64, device=peer.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    allocated, reserved = (most / GIB).tolist()
    return allocated, reserved
