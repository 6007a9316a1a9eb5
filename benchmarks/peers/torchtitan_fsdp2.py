"""torchtitan 0.2.2: its Llama 3, FSDP2, compilation, loss, clipping and optimizer, on the batches of all other rows.

What its trainer does around a step (its data loader, metrics, the count of valid tokens that the host waits for) is left out.
Its Llama has no tied head: where the job's has one, torchtitan trains a head of its own that starts as the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchtitan.config import JobConfig  # pyrefly: ignore[missing-import]
from torchtitan.distributed import ParallelDims  # pyrefly: ignore[missing-import]
from torchtitan.distributed import utils as titan  # pyrefly: ignore[missing-import]
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # pyrefly: ignore[missing-import]
from torchtitan.models.llama3.model.args import RoPEScalingArgs  # pyrefly: ignore[missing-import]
from torchtitan.protocols.model_converter import build_model_converters  # pyrefly: ignore[missing-import]
from torchtitan.tools.utils import GarbageCollection  # pyrefly: ignore[missing-import]

from benchmarks.peers.known import PEERS
from benchmarks.peers.mapping import torchtitan_value
from benchmarks.peers.measure import MicroBatch, Peer, fits, join, kept_gathered, measure, read_arguments
from benchmarks.peers.weights import fill

STATE_BYTES = 16  # a parameter: fp32 master, gradient and two moments, all cut
COMPILED_KEEPS = 0.6  # of what eager code keeps: 8B at 8192 tokens ran in 71 GiB of an 80 GB GPU
FLOAT8 = "quantize.linear.float8"


def main() -> None:
    """Build, parallelize, measure."""
    peer = read_arguments(PEERS["torchtitan"].options)
    join(peer)
    config = config_of(peer)
    parallel = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=peer.size)
    spec = get_train_spec()
    converters = build_model_converters(config, parallel)
    model = build(peer, spec, config, parallel, converters)
    optimizers = spec.build_optimizers_fn([model], config.optimizer, parallel)
    optimizers.register_step_post_hook(lambda *_, **__: converters.post_optimizer_hook([model]))
    loss_fn = spec.build_loss_fn(config, parallel_dims=parallel)
    context = titan.get_train_context(False)
    # on one device, where nothing is sharded, its bf16 is autocast
    amp = titan.maybe_enable_amp(parallel, config.training.mixed_precision_param, peer.device.type)
    garbage = GarbageCollection(gc_freq=config.training.gc_freq)
    most, tokens_in_all = peer.setting.job.optimizer.clip, float(peer.setting.tokens)
    done = 0

    def train(batch: list[MicroBatch]) -> Tensor:
        nonlocal done
        ((tokens, labels),) = batch
        done += 1
        garbage.run(done)
        optimizers.zero_grad()
        with context():
            with amp:
                logits = model(tokens)
                loss = (
                    loss_fn(logits, labels) / tokens_in_all
                )  # gradients are summed over ranks, not averaged
            del logits
            loss.backward()
        titan.clip_grad_norm_(list(model.parameters()), most, foreach=True)
        optimizers.step()
        return loss * peer.size

    mode = config.activation_checkpoint.mode
    says = f"{mode.replace('none', 'no')} recompute"
    says += kept_gathered(peer) + (", float8" if config.model.converters else "")
    measure(train, peer, says=says + (", head not tied" if peer.setting.dims.tied else ""))


def config_of(peer: Peer) -> JobConfig:
    """What a user sets in its TOML file; the rest is its defaults."""
    config, job = JobConfig(), peer.setting.job
    config.model.name = "llama3"
    config.training.seq_len = job.data.seq_len
    config.training.local_batch_size = peer.setting.micro_batch
    config.training.mixed_precision_param = "bfloat16" if job.train.precision == "bf16" else "float32"
    config.compile.enable = peer.on_gpu
    config.activation_checkpoint.mode = recompute(peer)
    config.parallelism.fsdp_reshard_after_forward = peer.options["reshard"]
    config.optimizer.lr, config.optimizer.eps = job.optimizer.lr, job.optimizer.eps
    config.optimizer.beta1, config.optimizer.beta2 = job.optimizer.betas
    config.optimizer.weight_decay = job.optimizer.weight_decay
    if peer.options["float8"] == "true":
        config.model.converters = [FLOAT8]
        float8 = config.quantize.linear.float8
        float8.enable_fsdp_float8_all_gather = True
        float8.precompute_float8_dynamic_scale_for_fsdp = True
        float8.filter_fqns = ["output"]
    return config


def recompute(peer: Peer) -> str:
    """The option's, else the least that fits."""
    if peer.options["recompute"] != "auto":
        return peer.options["recompute"]
    states = STATE_BYTES * peer.setting.parameters / peer.size
    return "none" if fits(peer, states, kept=COMPILED_KEEPS) else "selective"


def build(peer: Peer, spec: Any, config: JobConfig, parallel: ParallelDims, converters: Any) -> Any:
    """Its model on the meta device, converted, spread, then with the product's weights."""
    args = model_args(peer)
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    converters.convert(model)
    model = spec.parallelize_fn(model, parallel, config)
    model.to_empty(device=peer.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)  # its rotary table
    fill(model, peer, lambda name, whole: torchtitan_value(name, whole, peer.setting.dims))
    return model.train()


def model_args(peer: Peer) -> TransformerModelArgs:
    """The job's dimensions; rotary positions are not stretched."""
    dims = peer.setting.dims
    return TransformerModelArgs(
        dim=dims.dim,
        n_layers=dims.layers,
        n_heads=dims.heads,
        n_kv_heads=dims.kv_heads,
        vocab_size=dims.vocab,
        # it makes its width by int(int(8 / 3 dim) * multiplier)
        multiple_of=1,
        ffn_dim_multiplier=(dims.ffn + 0.5) / int(8 * dims.dim / 3),
        norm_eps=dims.norm_eps,
        rope_theta=dims.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )


if __name__ == "__main__":
    main()
