"""The model of `benchmarks/vision.py` trained by plain PyTorch, beside `shoal bench step benchmarks/jobs/vit_large.toml`.

    torchrun --nproc-per-node=4 -m benchmarks.vision_by_hand [--by ddp|fsdp2] [--steps 20] [--warmup 20] [--micro-batch 64]

bf16 (autocast under DDP, mixed precision of FSDP2), blocks compiled, fused AdamW, clipping; batches are on the device before
the clock runs. Rank 0 prints a line of JSON. On CPU ranks a smaller model (`--tiny`) tries it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.vision import Vit, datasets

DISTINCT_BATCHES = 4


def main() -> None:
    """Train and print."""
    options = _options()
    local, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    side = 32 if options.tiny else 224
    torch.manual_seed(0)
    model = Vit(64, 2, 2, side) if options.tiny else Vit()
    net = by_ddp(model, device) if options.by == "ddp" else by_fsdp2(model, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=on_gpu)
    images, _ = datasets(side)
    rank, size = dist.get_rank(), options.micro_batch
    batches = []
    for number in range(DISTINCT_BATCHES):
        first = (number * dist.get_world_size() + rank) * size
        pixels, classes = zip(*(images[first + at] for at in range(size)), strict=True)
        batches.append((torch.stack(pixels).to(device), torch.stack(classes).to(device)))
    seconds, loss = [], torch.zeros(())
    for number in range(options.warmup + options.steps):
        began = time.perf_counter()
        pixels, classes = batches[number % DISTINCT_BATCHES]
        with torch.autocast(device.type, torch.bfloat16, enabled=options.by == "ddp"):
            loss = F.cross_entropy(net(pixels), classes)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as a loop that logs does
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        step_s = statistics.median(seconds[options.warmup :])
        memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        found = {
            "by": options.by,
            "step_s": step_s,
            "images_per_s_per_gpu": size / step_s,
            "loss": loss.item(),
        }
        print(json.dumps(found | {"allocated_gib": memory}), flush=True)
    dist.destroy_process_group()


def by_ddp(model: Vit, device: torch.device) -> nn.Module:
    """Copies of compiled blocks."""
    compile_blocks(model, device)
    return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)


def by_fsdp2(model: Vit, device: torch.device) -> nn.Module:
    """Compiled blocks, sharded; gathered parameters are kept until backward, since there is room (ZeRO-2)."""
    types = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compile_blocks(model.to(device), device)
    for block in model.blocks:
        fully_shard(block, mp_policy=types, reshard_after_forward=False)
    fully_shard(model, mp_policy=types, reshard_after_forward=False)
    return model


def compile_blocks(model: Vit, device: torch.device) -> None:
    """On a GPU, one after the other, of equal code."""
    for block in model.blocks:
        if device.type == "cuda":
            block.compile()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
