"""Hugging Face's Llama at a setting's dimensions, with the product's initial weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.peers.mapping import HUGGING_FACE, renamed
from benchmarks.peers.measure import Peer
from benchmarks.peers.weights import fill


def build(peer: Peer) -> Any:
    """LlamaForCausalLM in fp32 on the device; SDPA attention."""
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
        attn_implementation="sdpa",  # pyrefly: ignore
    )
    with peer.device:
        model = LlamaForCausalLM(config)
    fill(model, peer, lambda name, whole: whole(renamed(name, HUGGING_FACE)))
    return model.train()


def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of labels that are shifted already."""
    return model(input_ids=tokens, labels=labels, shift_labels=labels).loss
