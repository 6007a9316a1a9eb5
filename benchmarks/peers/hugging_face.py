"""Hugging Face's Llama at a setting's dimensions, with random weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.measure import Peer


def build(peer: Peer) -> Any:
    """LlamaForCausalLM in fp32 on the device, equal on every rank; SDPA attention."""
    from transformers import LlamaConfig, LlamaForCausalLM  # pyrefly: ignore[missing-import]

    dims = peer.setting.dims
    config = LlamaConfig(
        hidden_size=dims.dim,
        num_hidden_layers=dims.layers,
        num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads,
        intermediate_size=dims.ffn,
        vocab_size=dims.vocab,
        tie_word_embeddings=dims.tied,
        rms_norm_eps=dims.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": dims.rope_theta},
        max_position_embeddings=peer.setting.job.data.seq_len,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with peer.device:
        model = LlamaForCausalLM(config)
    _initialise(model, peer)
    return model.train()


@torch.no_grad()
def _initialise(model: nn.Module, peer: Peer) -> None:
    """The distribution of the product's Llama: projections onto the residual stream start smaller."""
    generator = torch.Generator(peer.device).manual_seed(0)
    residual_std = 0.02 / math.sqrt(2 * peer.setting.dims.layers)
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if parameter.dim() > 1:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, residual_std if is_residual else 0.02, generator=generator)
        else:
            parameter.fill_(1.0)


def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of labels that are shifted already."""
    return model(input_ids=tokens, labels=labels, shift_labels=labels).loss
