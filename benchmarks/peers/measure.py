"""What every peer script shares: joining, the same batches as the product reads, timing, and the line of results."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.machine import version_of
from torch import Tensor, nn

from benchmarks.setting import Setting, read_setting
from shoal.data.batches import batches, open_dataset
from shoal.models.llama import Llama
from shoal.parallel.initialise import seed_of
from shoal.plan import Plan

GIB = 1024**3
SYNCED_STEPS = 5
Train = Callable[[Tensor, Tensor], Tensor]
"""(tokens, labels), both (B, T), to this rank's mean loss: one optimizer step"""


class Peer(NamedTuple):
    """One rank of a peer."""

    rank: int
    size: int
    device: torch.device
    setting: Setting

    @property
    def compute(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.setting.job.train.precision]


def read_arguments() -> Peer:
    """This rank as torchrun started it; the process group is for the peer to make."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="job file")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    return Peer(rank, size, device, read_setting(given.job, size, given.steps))


def join(peer: Peer) -> None:
    """Make the process group."""
    on_gpu = peer.device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=peer.device if on_gpu else None)


def adamw(model: nn.Module, peer: Peer) -> torch.optim.AdamW:
    """torch's fused AdamW as the job says; matrices decay, vectors do not."""
    settings = peer.setting.job.optimizer
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


@torch.no_grad()
def product_weights(model: nn.Module, peer: Peer, product_name: Callable[[str], str] = str) -> None:
    """Give every parameter the initial value that the product gives it, so that all rows start from equal weights.

    Args:
        product_name: from a parameter's name here to its name in `shoal.models.llama.Llama`.
    """
    seed = peer.setting.job.train.seed
    with torch.device("meta"):
        product = Llama(peer.setting.dims)

    def whole(item: tuple[str, nn.Parameter]) -> Tensor:
        name = product_name(item[0])
        tensor = torch.empty(item[1].shape)
        product.init_parameter(name, tensor, torch.Generator().manual_seed(seed_of(seed, name)))
        return tensor

    named = list(model.named_parameters())  # a tied weight comes once
    with ThreadPoolExecutor(max_workers=8) as pool:
        for (_, parameter), tensor in zip(named, pool.map(whole, named), strict=True):
            parameter.copy_(tensor)


def measure(train: Train, peer: Peer) -> None:
    """Run the job's steps, then a few with a wait for the device around each; rank 0 prints a line of JSON."""
    data = load_batches(peer, peer.setting.job.train.steps + SYNCED_STEPS)
    if peer.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    steps = peer.setting.job.train.steps
    seconds, losses = timed(train, data[:steps], peer)
    end = time.time()
    synced = timed_synced(train, data[steps:], peer)
    allocated, reserved = most_memory(peer)
    if peer.rank == 0:
        details = {
            "synced_seconds": synced,
            "packages": {name: version_of(name) for name in ("torch", "transformers", "accelerate")},
        }
        window = (end - sum(seconds[peer.setting.warmup :]), end)
        result = {
            "seconds": seconds,
            "losses": losses,
            "allocated_gib": allocated,
            "reserved_gib": reserved,
            "window": window,
            "details": details,
        }
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def load_batches(peer: Peer, steps: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches of all steps, on the device before the clock runs: the samples that the product takes."""
    job = peer.setting.job
    plan = Plan(replicate=peer.size, micro_batch=peer.setting.micro_batch)
    dataset = open_dataset(job.data, job.train.seed, None).train
    found = []
    for batch in batches(dataset, job, plan, peer, stop=steps):
        (micro,) = batch.micro_batches
        found.append((micro.data["tokens"].to(peer.device), micro.data["labels"].to(peer.device)))
    return found


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


def timed(train: Train, data: Iterable[tuple[Tensor, Tensor]], peer: Peer) -> tuple[list[float], list[float]]:
    """Seconds between the ends of steps, and losses. On a GPU one step is always under way, as in a real loop."""
    ahead = 1 if peer.device.type == "cuda" else 0
    unread: list[Reading] = []
    seconds, losses, last = [], [], time.perf_counter()

    def read(leave: int) -> None:
        nonlocal last
        while len(unread) > leave:
            losses.append(unread.pop(0).value())
            now = time.perf_counter()
            seconds.append(now - last)
            last = now

    for tokens, labels in data:
        unread.append(Reading(train(tokens, labels), peer.size))
        read(leave=ahead)
    read(leave=0)
    return seconds, losses


def timed_synced(train: Train, data: Iterable[tuple[Tensor, Tensor]], peer: Peer) -> list[float]:
    """Seconds of each step with the device waited for before and after it."""
    seconds = []
    for tokens, labels in data:
        wait(peer)
        began = time.perf_counter()
        train(tokens, labels)
        wait(peer)
        seconds.append(time.perf_counter() - began)
    return seconds


def wait(peer: Peer) -> None:
    if peer.device.type == "cuda":
        torch.cuda.synchronize()


def most_memory(peer: Peer) -> tuple[float | None, float | None]:
    """Peak allocated and reserved GiB, the most over the ranks; None without a GPU. Collective."""
    if peer.device.type != "cuda":
        return None, None
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    most = torch.tensor(peaks, dtype=torch.float64, device=peer.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    allocated, reserved = (most / GIB).tolist()
    return allocated, reserved
