"""DeepSpeed on Hugging Face's Llama, eager: ZeRO-2 where whole bf16 parameters fit, else ZeRO-3 with large buckets.

Its fp32 masters are made from parameters that were rounded to bf16, so its first loss differs a little from the others'.
"""

from __future__ import annotations

from typing import Any

import deepspeed  # pyrefly: ignore[missing-import]
from torch import Tensor

from benchmarks.peers import hugging_face
from benchmarks.peers.known import PEERS
from benchmarks.peers.measure import (
    MicroBatch,
    Peer,
    adamw,
    fits,
    measure,
    read_arguments,
    recomputes,
)

# a parameter: masters and two moments, cut
CUT_BYTES = 12
# its ZeRO-2 keeps whole parameters, and gradients that are cut once they are summed
ZERO2_BYTES = 4
ZERO3_CUT_BYTES = 16
EAGER_KEEPS = 1.3  # of activation_bytes: norms in fp32, rotated queries, the product of gate and up
BUCKET = 500_000_000  # elements
LIVE = 2_000_000_000


def main() -> None:
    """Build, initialize, measure."""
    peer = read_arguments(PEERS["deepspeed"].options)
    deepspeed.init_distributed(dist_backend="nccl" if peer.on_gpu else "gloo")
    stage = stage_of(peer)
    again = recomputes(peer, state_bytes(peer, stage), EAGER_KEEPS)
    model = hugging_face.build(peer).to(peer.compute)
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=adamw(model, peer),
        config=config(peer, stage),
    )

    def train(batch: list[MicroBatch]) -> Tensor:
        ((tokens, labels),) = batch
        loss = hugging_face.loss_of(engine, tokens, labels)
        engine.backward(loss)
        engine.step()
        return loss

    measure(train, peer, says=f"ZeRO-{stage}, {'full' if again else 'no'} recompute")


def stage_of(peer: Peer) -> int:
    """The option's, else the one that sends least of those that fit."""
    if peer.options["stage"] != "auto":
        return int(peer.options["stage"])
    return 2 if fits(peer, state_bytes(peer, 2), EAGER_KEEPS) else 3


def state_bytes(peer: Peer, stage: int) -> float:
    """About what the engine keeps on a GPU between steps, with its buckets."""
    parameters = peer.setting.parameters
    if stage == 3:
        return ZERO3_CUT_BYTES * parameters / peer.size + 2 * min(LIVE, parameters)
    return ZERO2_BYTES * parameters + CUT_BYTES * parameters / peer.size + 4 * min(BUCKET, parameters)


def config(peer: Peer, stage: int) -> dict[str, Any]:
    """The JSON that a user writes."""
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 1_000_000,
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
            "sub_group_size": 1_000_000_000,
        }
    else:
        zero |= {"allgather_bucket_size": BUCKET, "reduce_scatter": True}
    return {
        "train_micro_batch_size_per_gpu": peer.setting.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": peer.setting.job.optimizer.clip,
        "bf16": {"enabled": peer.setting.job.train.precision == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW; its own needs a compiler at run time
        "steps_per_print": 10**9,
    }


if __name__ == "__main__":
    main()
