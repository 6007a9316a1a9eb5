"""Hugging Face Accelerate with FSDP2 and regional compilation, the fastest of its documented settings; no Trainer."""

from __future__ import annotations

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # pyrefly: ignore[missing-import]
from accelerate.utils import TorchDynamoPlugin  # pyrefly: ignore[missing-import]
from torch import Tensor

from benchmarks.peers import hugging_face
from benchmarks.peers.known import PEERS
from benchmarks.peers.measure import MicroBatch, adamw, kept_gathered, measure, read_arguments, recomputes

STATE_BYTES = 16  # a parameter: fp32 master, gradient and two moments, all cut


def main() -> None:
    """Build, prepare, measure."""
    peer = read_arguments(PEERS["accelerate"].options)
    again = recomputes(peer, STATE_BYTES * peer.setting.parameters / peer.size)
    accelerator = Accelerator(
        mixed_precision="bf16",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=peer.options["reshard"] == "default",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
            activation_checkpointing=again,
            state_dict_type="SHARDED_STATE_DICT",
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),  # pyrefly: ignore
    )
    built = hugging_face.build(peer)
    model, optimizer = accelerator.prepare(built, adamw(built, peer))
    del built
    most = peer.setting.job.optimizer.clip

    def train(batch: list[MicroBatch]) -> Tensor:
        ((tokens, labels),) = batch
        loss = hugging_face.loss_of(model, tokens, labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    measure(train, peer, says=("full recompute" if again else "no recompute") + kept_gathered(peer))


if __name__ == "__main__":
    main()
