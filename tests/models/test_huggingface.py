"""Models of transformers train as plain transformers does, on one process and on any plan that they allow."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.parallel.spread import require_sizes
from shoal.plan import Plan
from shoal.world import World
from tests.ranks import run_ranks

pytest.importorskip("transformers")

from tests.models import hf_toy as toy

KINDS = list(toy.CONFIGS)
PARALLEL = {
    "zero3": Plan(shard=2, micro_batch=2),
    "tensor": Plan(tensor=2),
    "ring": Plan(context=2),
    "pipeline": Plan(pipeline=2, micro_batch=4),
}
# fp64 sums in another order differ by 1e-16 relative; three steps of AdamW, which divides small numbers by small numbers, let the
# weights differ by more
TOLERANCE = 1e-9


@lru_cache
def folder_of(kind: str) -> Path:
    return toy.folder_of(kind)


@lru_cache
def plainly(kind: str) -> toy.Record:
    return toy.run_plainly(toy.plain_model(folder_of(kind)))


def assert_same(records: list[toy.Record], reference: toy.Record) -> None:
    """Ranks of a pipeline have a part of the weights each."""
    weights = {name: weight for record in records for name, weight in record.weights.items()}
    assert set(weights) == set(reference.weights)
    for record in records:
        assert record.initial_hash == reference.initial_hash
        assert record.losses == pytest.approx(reference.losses, rel=TOLERANCE)
        assert record.norms == pytest.approx(reference.norms, rel=TOLERANCE)
    for name, weight in reference.weights.items():
        atol = TOLERANCE * float(weight.abs().max())
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=atol, msg=name)


SOLO = Plan()
OTHERS = {  # which models, and what is particular about them
    "zero3": ["mixtral", "gpt2"],
    "tensor": [
        "qwen3",  # norms inside of attention
        "gemma",  # an embedding that is scaled stays whole
        "gemma2",  # logits that are capped after the head
        "phi",  # biases everywhere, attention and feed-forward side by side
        "gpt_neox",  # query, key and value in one linear, by heads
        "mixtral",  # experts stay whole
    ],
    "ring": ["gpt2"],  # positions that are looked up
    "pipeline": ["gemma3_text", "mixtral"],  # blocks of two kinds, with a rotary table each
}


def run_folders(world: World, plan: Plan, folders: list[Path]) -> list[toy.Record]:
    return [toy.run_plan(world, plan, folder) for folder in folders]


@lru_cache
def on_plan(name: str) -> dict[str, list[toy.Record]]:
    """Records of all ranks, by model; started once for all models, since importing transformers takes longer than they do."""
    plan, kinds = (PARALLEL[name], ["llama", *OTHERS[name]]) if name else (SOLO, KINDS)
    by_rank = run_ranks(plan.world_size, run_folders, plan, [folder_of(kind) for kind in kinds], timeout=240)
    return dict(zip(kinds, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_as_plain_transformers_does(kind: str) -> None:
    assert_same(on_plan("")[kind], plainly(kind))


@pytest.mark.parametrize("name", PARALLEL)
def test_llama_trains_alike_on_every_axis(name: str) -> None:
    assert_same(on_plan(name)["llama"], plainly("llama"))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=4),  # more ranks than key/value heads
        Plan(tensor=2, context=2, context_by="all_to_all"),
        Plan(pipeline=2, tensor=2, micro_batch=4, schedule="interleaved_1f1b"),
        Plan(shard=2, tensor=2),
    ],
    ids=Plan.describe,
)
def test_axes_of_llama_compose(plan: Plan) -> None:
    assert_same(run_ranks(plan.world_size, toy.run_plan, plan, folder_of("llama")), plainly("llama"))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(shard=2, expert=2, micro_batch=2),
        Plan(context=2, expert=2),
        Plan(pipeline=2, shard=2, expert=2, micro_batch=4),
        Plan(shard=4, zero=2, expert=2),
    ],
    ids=Plan.describe,
)
def test_mixtures_share_their_experts(plan: Plan) -> None:
    kinds = ["mixtral", "qwen3_moe"]
    by_rank = run_ranks(plan.world_size, run_folders, plan, [folder_of(kind) for kind in kinds], timeout=240)
    for kind, records in zip(kinds, map(list, zip(*by_rank, strict=True)), strict=True):
        assert_same(records, plainly(kind))


def test_experts_that_cannot_be_shared_are_refused() -> None:
    from shoal.models.huggingface import builder_of

    with pytest.raises(ValueError, match=r"plan.expert = 3 does not divide the 4 experts.*\[1, 2, 4\]"):
        require_sizes(builder_of(str(folder_of("mixtral")))(), Plan(shard=3, expert=3), 12)
    with pytest.raises(ValueError, match="shares the experts of a mixture"):
        require_sizes(builder_of(str(folder_of("llama")))(), Plan(shard=2, expert=2), 12)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in OTHERS.items() for kind in kinds])
def test_other_models_train_alike_where_their_structure_allows_it(name: str, kind: str) -> None:
    assert_same(on_plan(name)[kind], plainly(kind))


@pytest.mark.parametrize("name", ["tensor", "ring", "pipeline"])
def test_documents_are_kept_apart_alike_on_every_plan(name: str) -> None:
    plan = PARALLEL[name]
    alone = run_ranks(1, toy.run_plan, Plan(), folder_of("llama"), None, True)[0]
    assert alone.losses != pytest.approx(plainly("llama").losses, rel=1e-3)
    assert_same(run_ranks(plan.world_size, toy.run_plan, plan, folder_of("llama"), None, True), alone)


def attends_apart(world: World, folders: list[Path]) -> list[float]:
    """Largest difference between a document's logits alone, and behind another in one sample; by model."""
    from shoal.models.huggingface import builder_of
    from shoal.parallel.apply import parallelize

    tokens = torch.randint(0, toy.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(12) >= 7).long().expand(2, -1)
    positions = torch.arange(12) - 7 * documents
    found = []
    for folder in folders:
        model = parallelize(builder_of(str(folder)), Plan(), world, precision="fp64").eval()
        with torch.no_grad(), toy.AllWide():
            packed = model(tokens, positions=positions, documents=documents)
            found.append(float((packed[:, 7:] - model(tokens[:, 7:])).abs().max()))
    return found


def test_a_packed_document_sees_what_it_sees_alone() -> None:
    differences = run_ranks(1, attends_apart, [folder_of(kind) for kind in KINDS])[0]
    assert max(differences) < 1e-12, dict(zip(KINDS, differences, strict=True))


def refusal(world: World, plan: Plan, folder: Path, options: dict[str, Any]) -> str:
    try:
        toy.run_plan(world, plan, folder, options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        ("gpt2", "tensor", {}, ["plan.tensor = 2", "GPT2LMHeadModel", "fused", "shard"]),
        ("phi3", "tensor", {}, ["plan.tensor = 2", "Phi3ForCausalLM", "fused"]),
        ("gpt2", "pipeline", {}, ["plan.pipeline = 2", "transformer.wpe"]),
        ("mistral", "ring", {}, ["plan.context = 2", "windows of 5"]),
        (
            "llama",
            "tensor",
            {"lora": {"target_modules": ["q_proj", "down_proj"]}},
            ["plan.tensor = 2", "adapted"],
        ),
        (
            "llama",
            "ring",
            {"config": {"attention_dropout": 0.1}},
            ["plan.context = 2", "dropout 0.1", "model.options.config.attention_dropout=0.0,"],
        ),
    ],
)
def test_what_a_structure_does_not_allow_is_refused_with_the_reason(
    kind: str, name: str, options: dict[str, Any], words: list[str]
) -> None:
    message = run_ranks(2, refusal, PARALLEL[name], folder_of(kind), options)[0]
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("plan", "length", "words"),
    [
        (Plan(tensor=3), 12, ["plan.tensor = 3", "num_attention_heads = 4"]),
        (Plan(tensor=2), 13, ["data.seq_len", "multiple of 2", "14 would do"]),
        (Plan(context=2), 14, ["plan.context = 2", "multiple of 4", "16 would do"]),
        (Plan(pipeline=8), 12, ["plan.pipeline = 8", "4 blocks"]),
        (Plan(tensor=2, context=4, context_by="all_to_all"), 16, ["rank's 2 heads", "ring"]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_ranks_start(
    plan: Plan, length: int, words: list[str]
) -> None:
    from shoal.models.huggingface import builder_of

    with pytest.raises(ValueError, match=r"plan\.") as raised:
        require_sizes(builder_of(str(folder_of("llama")))(), plan, length)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("kind", "changes", "plan"),
    [
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.2}, Plan(context=2)),
        ("gpt_neox", {"attention_dropout": 0.1, "hidden_dropout": 0.2}, Plan(context=2)),
        ("gpt_neox", {"attention_dropout": 0.1, "hidden_dropout": 0.2, "vocab_size": 53}, Plan(tensor=2)),
    ],
)
def test_dropout_in_the_way_is_named_by_the_familys_own_entries_and_gone_without_them(
    kind: str, changes: dict[str, Any], plan: Plan
) -> None:
    from shoal.config import apply_overrides
    from shoal.models.huggingface import builder_of

    folder = str(toy.folder_of(kind, **changes))
    with pytest.raises(ValueError, match=r"drop") as raised:
        require_sizes(builder_of(folder)(), plan, 16)
    words = re.findall(r"model\.options\.config\.\w+=[\d.]+", str(raised.value))
    options = apply_overrides({}, words)["model"]["options"]
    assert set(options["config"]) <= set(changes)
    require_sizes(builder_of(folder, **options)(), plan, 16)


@pytest.mark.parametrize(
    ("file", "instead"), [("", rf"use data\.vocab={toy.VOCAB}"), ("tokenizer.json", "its own tokenizer")]
)
def test_a_tokenizer_that_has_too_many_tokens_is_refused_with_what_is_there(
    tmp_path: Path, file: str, instead: str
) -> None:
    from shoal.models.huggingface import builder_of

    (tmp_path / "config.json").write_text((folder_of("llama") / "config.json").read_text())
    if file:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=instead):
        builder_of(str(tmp_path), vocab=toy.VOCAB + 1)


def test_a_vocabulary_that_does_not_divide_stays_whole(tmp_path: Path) -> None:
    folder = toy.folder_of("llama", vocab_size=53)
    alone = toy.run_plainly(toy.plain_model(folder))
    assert_same(run_ranks(2, toy.run_plan, PARALLEL["tensor"], folder), alone)


def test_a_model_has_no_storage_until_it_is_spread_but_right_buffers() -> None:
    import transformers

    from shoal.models.huggingface import builder_of

    folder = folder_of("llama")
    with torch.device("meta"):
        model = builder_of(str(folder))()
    plain: Any = transformers.AutoModelForCausalLM.from_config(toy.config_of("llama"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert set(dict(model.named_parameters())) == set(dict(plain.named_parameters()))
    assert dict(model.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
