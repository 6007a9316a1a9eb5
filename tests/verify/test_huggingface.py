"""Small models of the same kind, for `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.config import parse
from shoal.parallel.spread import require_sizes
from shoal.plan import Plan
from shoal.verify.run import ends_and_experts, every_plan

pytest.importorskip("transformers")

from shoal.models.huggingface import builder_of
from shoal.verify.huggingface import is_tied, num_experts, small_options

LENGTH = 12


def large(kind: str, folder: Path, **changes: Any) -> str:
    """A folder with transformers' own sizes for a kind: billions of parameters, for most."""
    import transformers

    transformers.AutoConfig.for_model(kind, **changes).save_pretrained(folder)
    return f"hf:{folder}"


TENSOR, EXPERT = Plan(tensor=2), Plan(shard=2, expert=2)


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        ("llama", [TENSOR]),
        ("gemma3_text", [TENSOR]),
        ("phi3", []),
        ("gpt2", []),
        ("gpt_neox", [TENSOR]),
        ("mixtral", [TENSOR, EXPERT]),
        ("gpt_oss", [EXPERT]),
        ("deepseek_v3", [TENSOR, EXPERT]),
    ],
)
def test_a_model_of_any_kind_becomes_small_and_can_be_cut_as_before(
    kind: str, allowed: list[Plan], tmp_path: Path
) -> None:
    family = large(kind, tmp_path)
    for plan in (TENSOR, EXPERT):
        model = builder_of(family, **small_options(family, {}, plan, LENGTH))()
        assert sum(parameter.numel() for parameter in model.parameters()) < 4e6
        if plan in allowed:
            require_sizes(model, plan, LENGTH)
        else:
            with pytest.raises(ValueError, match=r"^plan\.(tensor|expert) = 2"):
                require_sizes(model, plan, LENGTH)


def test_kinds_of_blocks_groups_of_heads_and_experts_stay(tmp_path: Path) -> None:
    family = large("gemma3_text", tmp_path / "gemma", tie_word_embeddings=True)
    model = builder_of(family, **small_options(family, {}, Plan(), LENGTH))()
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.config.sliding_window < LENGTH
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert is_tied(family, {})
    family = large("mixtral", tmp_path / "mixtral")
    options = small_options(family, {"lora": None}, Plan(), LENGTH)
    assert options["weights"] is False and "lora" in options
    assert num_experts(family, options) == 4
    family = large("llama", tmp_path / "llama")
    assert num_experts(family, small_options(family, {}, Plan(), LENGTH)) == 1


def test_blocks_alone_become_fewer_where_a_model_cannot_be_narrow(tmp_path: Path) -> None:
    """A vocabulary that belongs to the user's data stays."""
    family = large("llama", tmp_path, vocab_size=999)
    options = small_options(family, {}, Plan(), LENGTH, same_tokens=True)
    assert builder_of(family, **options)().config.vocab_size == 999
    # 12 heads of a width that is said elsewhere, and that 4 heads would not have
    family = large("gpt_neox", tmp_path / "odd", hidden_size=96, num_attention_heads=12)
    assert builder_of(family, **small_options(family, {}, Plan(), LENGTH))().config.num_hidden_layers == 2


def test_every_plan_of_a_mixture_shares_its_experts_too(tmp_path: Path) -> None:
    table = {
        "model": {"family": large("qwen3_moe", tmp_path)},
        "data": {"source": "synthetic", "vocab": 512, "seq_len": 64},
        "train": {"steps": 1, "global_batch": 4},
    }
    plans = list(every_plan(2, **ends_and_experts(parse(table, where="a test"))))
    assert {plan.expert for plan in plans} == {1, 2}
