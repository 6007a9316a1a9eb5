"""Plain PyTorch as most people write it: Hugging Face's Llama, eager, DistributedDataParallel, autocast to bf16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import hugging_face
from benchmarks.peers.measure import MicroBatch, adamw, join, measure, read_arguments


def main() -> None:
    """Build, wrap, measure."""
    peer = read_arguments()
    join(peer)
    model = DistributedDataParallel(hugging_face.build(peer), gradient_as_bucket_view=True)
    optimizer = adamw(model, peer)
    most = peer.setting.job.optimizer.clip

    def train(batch: list[MicroBatch]) -> Tensor:
        ((tokens, labels),) = batch
        with torch.autocast(peer.device.type, peer.compute):
            loss = hugging_face.loss_of(model, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    measure(train, peer)


if __name__ == "__main__":
    main()
