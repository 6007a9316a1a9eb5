"""A peer that starts from the mapped weights computes what the product's model computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.peers.mapping import HUGGING_FACE, megatron_part, renamed, torchtitan_value
from shoal.models.llama import Llama, rotary_table, rotate
from shoal.models.presets import LlamaDims

DIMS = LlamaDims(
    dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64, tied=False, rope_theta=1e4, norm_eps=1e-5
)


def product() -> dict[str, Tensor]:
    model = Llama(DIMS)
    return {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, (name, p) in
            enumerate(model.named_parameters())}  # fmt: skip


def test_torchtitans_queries_and_keys_meet_in_its_rotary_pairs_as_in_ours() -> None:
    """Scores are equal: ours turns (i, i + E/2), a complex product turns (2 i, 2 i + 1). In fp64, as sums cancel."""
    weights = {name: value.double() for name, value in product().items()}
    x = torch.randn(1, 6, DIMS.dim, dtype=torch.float64)
    table = rotary_table(torch.arange(6), DIMS.head_dim, DIMS.rope_theta).double()
    turns = torch.complex(*(part.squeeze(-2) for part in table))[None, :, None]  # (1, T, 1, E/2)

    def ours(kind: str) -> Tensor:
        made = x @ weights[f"blocks.0.attention.{kind}.weight"].T
        return rotate(made.view(1, 6, -1, DIMS.head_dim), table)

    def theirs(name: str) -> Tensor:
        made = x @ torchtitan_value(f"layers.0.attention.{name}.weight", weights.__getitem__, DIMS).T
        pairs = torch.view_as_complex(made.view(1, 6, -1, DIMS.head_dim // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(3)

    def scores(query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("bthe,bshe->bhts", query, key.repeat_interleave(2, dim=2))

    torch.testing.assert_close(scores(theirs("wq"), theirs("wk")), scores(ours("query"), ours("key")))


def test_every_name_of_torchtitans_model_is_one_of_ours() -> None:
    weights = product()
    block = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
             "feed_forward.w3", "attention_norm", "ffn_norm"]  # fmt: skip
    names = [f"layers.{layer}._orig_mod.{part}.weight" for layer in range(2) for part in block]
    names += ["tok_embeddings.weight", "norm.weight", "output.weight"]
    found = [torchtitan_value(name, weights.__getitem__, DIMS) for name in names]
    assert sum(one.numel() for one in found) == sum(one.numel() for one in weights.values())


@pytest.mark.parametrize("tensor", [1, 2])
def test_megatrons_parts_make_the_same_queries_keys_values_and_gates(tensor: int) -> None:
    """As its attention cuts them: a rank's groups, each of its queries, one key and one value."""
    weights, x = product(), torch.randn(5, DIMS.dim)
    per_group = DIMS.heads // DIMS.kv_heads
    groups = DIMS.kv_heads // tensor
    query, key, value = (
        x @ weights[f"blocks.1.attention.{kind}.weight"].T for kind in ("query", "key", "value")
    )
    gate, up = (x @ weights[f"blocks.1.feed_forward.{kind}.weight"].T for kind in ("gate", "up"))
    for rank in range(tensor):

        def part(name: str, rank: int = rank) -> Tensor:
            return megatron_part(f"decoder.layers.1.{name}.weight", weights.__getitem__, DIMS, rank, tensor)

        mixed = (x @ part("self_attention.linear_qkv").T).view(5, groups, per_group + 2, DIMS.head_dim)
        q, k, v = mixed.split([per_group, 1, 1], dim=2)
        for found, whole in ((q, query), (k, key), (v, value)):
            torch.testing.assert_close(found.flatten(1), whole.chunk(tensor, dim=1)[rank])
        mine = (x @ part("mlp.linear_fc1").T).chunk(2, dim=1)
        torch.testing.assert_close(mine[0], gate.chunk(tensor, dim=1)[rank])
        torch.testing.assert_close(mine[1], up.chunk(tensor, dim=1)[rank])


def test_megatrons_row_parallel_parts_add_up_to_the_whole() -> None:
    weights, x = product(), torch.randn(5, DIMS.ffn)
    parts = [
        megatron_part("decoder.layers.0.mlp.linear_fc2.weight", weights.__getitem__, DIMS, rank, 2)
        for rank in (0, 1)
    ]
    summed = sum(mine @ part.T for mine, part in zip(x.chunk(2, dim=1), parts, strict=True))
    torch.testing.assert_close(summed, x @ weights["blocks.0.feed_forward.down.weight"].T)


def test_a_parameter_of_megatrons_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"not known here: decoder\.layers\.0\.mlp\.router\.weight"):
        megatron_part("decoder.layers.0.mlp.router.weight", product().__getitem__, DIMS, 0, 1)


def test_hugging_faces_llama_gives_our_logits() -> None:
    transformers = pytest.importorskip("transformers")
    weights = product()
    config = transformers.LlamaConfig(
        hidden_size=DIMS.dim, num_hidden_layers=DIMS.layers, num_attention_heads=DIMS.heads,
        num_key_value_heads=DIMS.kv_heads, intermediate_size=DIMS.ffn, vocab_size=DIMS.vocab,
        tie_word_embeddings=False, rms_norm_eps=DIMS.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": DIMS.rope_theta},
    )  # fmt: skip
    theirs, ours = transformers.LlamaForCausalLM(config), Llama(DIMS)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[renamed(name, HUGGING_FACE)])
        ours.load_state_dict(weights)
        tokens = torch.arange(10)[None]
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)
