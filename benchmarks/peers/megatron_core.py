"""Megatron-Core 0.19.2 without Transformer Engine: its GPT of local layers, data parallel with the distributed optimizer.

`tensor` ranks share a sample (with sequence parallelism): 1 where all states fit beside what forward keeps, else 2.

Two modules are replaced, since Megatron's own without Transformer Engine either hold all scores of attention or refuse sequence
parallelism: attention is torch's, and so is RMSNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state  # pyrefly: ignore[missing-import]
from megatron.core.distributed import (  # pyrefly: ignore[missing-import]
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # pyrefly: ignore[missing-import]
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # pyrefly: ignore[missing-import]
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # pyrefly: ignore[missing-import]
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # pyrefly: ignore[missing-import]
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # pyrefly: ignore[missing-import]
from megatron.core.transformer.dot_product_attention import DotProductAttention  # pyrefly: ignore[missing-import]
from megatron.core.transformer.module import Float16Module  # pyrefly: ignore[missing-import]
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # pyrefly: ignore[missing-import]
from megatron.core.transformer.transformer_config import TransformerConfig  # pyrefly: ignore[missing-import]
from torch import Tensor, nn

from benchmarks.peers.known import PEERS
from benchmarks.peers.mapping import megatron_part
from benchmarks.peers.measure import (
    MicroBatch,
    Peer,
    Place,
    fits,
    join,
    measure,
    read_arguments,
    recomputes,
)
from benchmarks.peers.weights import fill

# a parameter of a tensor-parallel part: bf16 parameter and fp32 gradient whole; master and two moments cut
WHOLE_BYTES = 6
CUT_BYTES = 12
EAGER_KEEPS = 1.0


class TorchAttention(DotProductAttention):
    """Causal attention by torch: (T, B, heads, E) in, (T, B, heads E) out."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class TorchNorm(nn.RMSNorm):
    """RMSNorm, marked so that Megatron sums its gradient over ranks that share samples."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]


def main() -> None:
    """Build, wrap, measure."""
    peer = read_arguments(PEERS["megatron"].options)
    join(peer)
    tensor = tensor_of(peer)
    again = recomputes(peer, state_bytes(peer, tensor), EAGER_KEEPS / tensor)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(peer.setting.job.train.seed)
    config = config_of(peer, tensor, recompute=again)
    model = wrapped(built(peer, config), config, peer)
    optimizer = optimizer_of(model, peer)
    connect(config, model, optimizer)
    place = Place(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
    says = f"TP{tensor} x DP{place.size}, {'full' if again else 'no'} recompute"
    measure(step_of(model, optimizer, peer), peer, place=place, says=says)


def tensor_of(peer: Peer) -> int:
    """The option's, else the least that fits without recompute, 2 at most, since more was slower at 8B."""
    if peer.options["tensor"] != "auto":
        return int(peer.options["tensor"])
    return 1 if fits(peer, state_bytes(peer, 1), EAGER_KEEPS) or peer.size % 2 else 2


def state_bytes(peer: Peer, tensor: int) -> float:
    """What a GPU holds between steps."""
    parameters = peer.setting.parameters
    return WHOLE_BYTES * parameters / tensor + CUT_BYTES * parameters / peer.size


def config_of(peer: Peer, tensor: int, *, recompute: bool) -> TransformerConfig:
    """What Megatron-LM's arguments would make of these dimensions."""
    dims, again = peer.setting.dims, {}
    if recompute:
        again = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=dims.layers,
        hidden_size=dims.dim,
        num_attention_heads=dims.heads,
        num_query_groups=dims.kv_heads,
        ffn_hidden_size=dims.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=peer.compute is torch.bfloat16,
        params_dtype=peer.compute,
        pipeline_dtype=peer.compute,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        bias_activation_fusion=peer.on_gpu,
        bias_dropout_fusion=peer.on_gpu,
        cross_entropy_loss_fusion=peer.on_gpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        transformer_impl="local",
        use_cpu_initialization=not peer.on_gpu,
        perform_initialization=False,
        **again,
    )


def built(peer: Peer, config: TransformerConfig) -> GPTModel:
    """Its GPT with the product's weights."""
    dims = peer.setting.dims
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    layer.submodules.self_attention.submodules.core_attention = TorchAttention
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * dims.layers, layer_norm=TorchNorm),
        vocab_size=dims.vocab,
        max_sequence_length=peer.setting.job.data.seq_len,
        parallel_output=True,
        share_embeddings_and_output_weights=dims.tied,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=dims.rope_theta,
    ).to(peer.device)
    tensor = config.tensor_model_parallel_size
    rank = parallel_state.get_tensor_model_parallel_rank()
    fill(model, peer, lambda name, whole: megatron_part(name, whole, dims, rank, tensor))
    return model


def wrapped(model: GPTModel, config: TransformerConfig, peer: Peer) -> DistributedDataParallel:
    """bf16 parameters; gradients are summed in fp32 buckets, beside backward."""
    copies = parallel_state.get_data_parallel_world_size()
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=copies > 1,
        overlap_param_gather=copies > 1,
        use_distributed_optimizer=True,
        bucket_size=max(40_000_000, 1_000_000 * copies),  # Megatron-LM's rule
    )
    inner = Float16Module(config, model) if peer.compute is torch.bfloat16 else model
    return DistributedDataParallel(config, settings, inner)


def optimizer_of(model: DistributedDataParallel, peer: Peer) -> Any:
    """Its distributed Adam at a constant rate."""
    job, bf16 = peer.setting.job.optimizer, peer.compute is torch.bfloat16
    settings = OptimizerConfig(
        optimizer="adam",
        lr=job.lr,
        min_lr=job.lr,
        weight_decay=job.weight_decay,
        adam_beta1=job.betas[0],
        adam_beta2=job.betas[1],
        adam_eps=job.eps,
        bf16=bf16,
        params_dtype=peer.compute,
        use_distributed_optimizer=True,
        clip_grad=job.clip,
        overlap_param_gather=parallel_state.get_data_parallel_world_size() > 1,
    )
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        if peer.on_gpu and "fused" in group:  # torch's Adam stands in for Apex's, and is not fused by itself
            group["fused"], group["foreach"] = True, False
    return optimizer


def connect(config: TransformerConfig, model: DistributedDataParallel, optimizer: Any) -> None:
    """What its schedule calls around micro-batches."""
    config.no_sync_func = model.no_sync
    if parallel_state.get_data_parallel_world_size() > 1:
        config.grad_sync_func = model.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss


def step_of(model: DistributedDataParallel, optimizer: Any, peer: Peer) -> Any:
    """One step by its schedule without pipeline."""
    run = get_forward_backward_func()
    length, size = peer.setting.job.data.seq_len, peer.setting.micro_batch
    positions = torch.arange(length, device=peer.device).expand(size, -1)

    def forward(batches: Iterator[MicroBatch], part: nn.Module) -> tuple[Tensor, Any]:
        tokens, labels = next(batches)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

        return part(tokens, positions, None, labels=labels), mean

    def train(batch: list[MicroBatch]) -> Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = run(
            forward_step_func=forward,
            data_iterator=iter(batch),
            model=model,
            num_microbatches=len(batch),
            seq_length=length,
            micro_batch_size=size,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([one["loss"] for one in told]).mean()

    return train


if __name__ == "__main__":
    main()
