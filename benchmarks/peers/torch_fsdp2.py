"""FSDP2 by hand on the product's own model: what plain PyTorch reaches, so that the rest is what the framework costs.

Every block sharded and compiled, parameters freed after forward, the next block gathered while one runs, compiled
cross-entropy, cuDNN attention first, fused AdamW on DTensors.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.measure import MicroBatch, Peer, adamw, join, measure, read_arguments
from benchmarks.peers.weights import fill
from shoal.models.llama import Llama

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def main() -> None:
    """Build, shard, measure."""
    peer = read_arguments()
    join(peer)
    model = build(peer)
    shard(model, peer)
    optimizer = adamw(model, peer)
    loss_of = torch.compile(cross_entropy) if peer.on_gpu else cross_entropy
    most = peer.setting.job.optimizer.clip

    def train(batch: list[MicroBatch]) -> Tensor:
        ((tokens, labels),) = batch
        with sdpa_kernel(ATTENTION, set_priority=True):
            loss = loss_of(model(tokens), labels)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    measure(train, peer)


def build(peer: Peer) -> Llama:
    """The model on the device, with the product's initial weights."""
    with peer.device:
        model = Llama(peer.setting.dims)
    fill(model, peer, lambda name, whole: whole(name))
    return model


def shard(model: Llama, peer: Peer) -> None:
    """fully_shard each compiled block and the root, and say what to gather ahead."""
    types = {"param_dtype": peer.compute, "reduce_dtype": torch.float32}
    blocks: list[FSDPModule] = []
    for block in model.blocks:
        if peer.on_gpu:
            block.forward = torch.compile(block.forward)
        # the rotary table stays fp32
        blocks.append(fully_shard(block, mp_policy=MixedPrecisionPolicy(**types, cast_forward_inputs=False)))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**types), reshard_after_forward=False)
    for one, following in pairwise(blocks):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


if __name__ == "__main__":
    main()
