"""Weights of transformers are read by part, trained beside adapters, and written so that transformers gives the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.llama import Llama
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import weights_hash
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import DIMS

pytest.importorskip("transformers")

from tests.models import hf_toy as toy


def plain_logits(folder: Path, tokens: Tensor) -> Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32
    )
    with torch.no_grad():
        return model.eval()(tokens).logits


def plain_state(folder: Path) -> dict[str, Tensor]:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def some_tokens() -> Tensor:
    return torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))


class Seen(NamedTuple):
    logits: Tensor
    hash: str
    most_read: int
    """elements of the largest part that was read of the largest parameter"""


def read_and_run(world: World, plan: Plan, folder: Path, out: Path | None = None) -> Seen:
    from shoal.checkpoint.huggingface import export_huggingface
    from shoal.models.huggingface import builder_of
    from shoal.models.huggingface.weights import StoredWeights
    from shoal.train.objective import output_of

    sizes: list[int] = []
    original = StoredWeights.read

    def read(self: StoredWeights, name: str, part: Any, shape: torch.Size) -> Tensor:
        found = original(self, name, part, shape)
        sizes.append(found.numel())
        return found

    StoredWeights.read = read  # pyrefly: ignore
    try:
        model = parallelize(builder_of(str(folder)), plan, world).eval()
    finally:
        StoredWeights.read = original
    with torch.no_grad():
        logits = output_of(toy.NextTokenWhole(), model, {"tokens": some_tokens()})
    if out is not None:
        export_huggingface(model, out, shard_bytes=20_000)
    return Seen(logits, weights_hash(model), max(sizes))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "mixtral", "qwen3_moe"])
def test_stored_weights_give_the_logits_that_transformers_gives(kind: str, tmp_path: Path) -> None:
    folder = toy.saved(kind, tmp_path / "stored", shard="20KB")
    expected = plain_logits(folder, some_tokens())
    alone = run_ranks(1, read_and_run, Plan(), folder, tmp_path / "out")[0]
    torch.testing.assert_close(alone.logits, expected, rtol=1e-4, atol=1e-4)
    halves = run_ranks(2, read_and_run, Plan(shard=2), folder, tmp_path / "sharded")
    for seen in halves:
        assert seen.hash == alone.hash
        assert seen.most_read <= -(-alone.most_read // 2)  # each reads its half, and no more
    for out in (tmp_path / "out", tmp_path / "sharded"):
        found = plain_logits(out, some_tokens())
        # kernels round by where their inputs lie in memory
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        stored, written = plain_state(folder), plain_state(out)
        assert all(torch.equal(written[name], weight) for name, weight in stored.items())
        assert len(list(out.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(tensor=2, shard=2)], ids=Plan.describe)
def test_parts_of_a_cut_model_are_read_right(plan: Plan, tmp_path: Path) -> None:
    folder = toy.saved("llama", tmp_path)
    alone = run_ranks(1, read_and_run, Plan(), folder)[0]
    for seen in run_ranks(plan.world_size, read_and_run, plan, folder):
        assert seen.hash == alone.hash
        torch.testing.assert_close(seen.logits, alone.logits, rtol=1e-4, atol=1e-4)


def train_lora(world: World, plan: Plan, folder: Path, out: Path | None = None) -> toy.Record:
    from shoal.checkpoint.huggingface import export_huggingface
    from shoal.models.huggingface import builder_of

    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    model = parallelize(builder_of(str(folder), lora=lora), plan, world, precision="fp64", seed=7)
    initial = weights_hash(model)
    step = Step(model, toy.WideNextToken(), AdamW(lr=1e-2), plan, world, precision="fp64")
    results = [
        step(toy.part_of(toy.global_batch(index), index, plan, world.rank)) for index in range(toy.STEPS)
    ]
    record = toy.Record(
        initial, [r.loss for r in results], [r.grad_norm for r in results], toy.whole_weights(model)
    )
    if out is not None:
        export_huggingface(model, out)
    return record


def lora_by_hand(folder: Path) -> tuple[list[float], Any]:
    """peft on a plain transformers model, with the adapters that Shoal draws."""
    import peft
    import transformers

    from shoal.models.huggingface import builder_of
    from shoal.parallel.initialise import seed_of

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double()
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    drawn = builder_of(str(folder))()
    adapted: Any = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                name = name.removeprefix("base_model.model.")
                whole = torch.empty(parameter.shape)
                drawn.init_parameter(name, whole, torch.Generator().manual_seed(seed_of(7, name)))
                parameter.data = whole.double()
    return toy.run_plainly(adapted, AdamW(lr=1e-2)).losses, adapted


def test_adapters_train_and_weights_stay_on_any_plan_as_by_peft_itself(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = toy.saved("llama", tmp_path / "stored")
    alone = run_ranks(1, train_lora, Plan(), folder)[0]
    losses, _ = lora_by_hand(folder)
    assert alone.losses == pytest.approx(losses, rel=1e-9)
    before = run_ranks(1, read_weights, folder)[0]
    for name, weight in before.items():
        kept = alone.weights.get(name, alone.weights.get(name.replace(".weight", ".base_layer.weight")))
        assert kept is not None and torch.equal(kept, weight), name
    adapters = [name for name in alone.weights if "lora_B" in name]
    assert len(adapters) == 4 * 3
    assert all(alone.weights[name].abs().max() > 0 for name in adapters)
    for plan in (Plan(shard=2), Plan(pipeline=2, micro_batch=4)):
        records = run_ranks(2, train_lora, plan, folder)
        assert records[0].initial_hash == alone.initial_hash
        assert records[0].losses == pytest.approx(alone.losses, rel=1e-9)
        assert records[0].norms == pytest.approx(alone.norms, rel=1e-9)
        for name, weight in {n: w for record in records for n, w in record.weights.items()}.items():
            torch.testing.assert_close(weight, alone.weights[name], rtol=0, atol=1e-9, msg=name)


def read_weights(world: World, folder: Path) -> dict[str, Tensor]:
    from shoal.models.huggingface import builder_of

    return toy.whole_weights(parallelize(builder_of(str(folder)), Plan(), world, precision="fp64"))


def test_an_export_has_adapters_added_into_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = toy.saved("llama", tmp_path / "stored")
    run_ranks(2, train_lora, Plan(shard=2), folder, tmp_path / "out")
    _, adapted = lora_by_hand(folder)
    with torch.no_grad():
        expected = adapted.eval().float()(some_tokens()).logits
    torch.testing.assert_close(plain_logits(tmp_path / "out", some_tokens()), expected, rtol=1e-4, atol=1e-4)


def export_llama(world: World, plan: Plan, out: Path) -> Tensor:
    from functools import partial

    from shoal.checkpoint.huggingface import export_huggingface
    from shoal.train.objective import output_of

    model = parallelize(partial(Llama, DIMS), plan, world, seed=3)
    export_huggingface(model, out)
    with torch.no_grad():
        return output_of(toy.NextTokenWhole(), model.eval(), {"tokens": some_tokens()})


@pytest.mark.parametrize("plan", [Plan(), Plan(shard=2), Plan(tensor=2)], ids=Plan.describe)
def test_our_llama_is_exported_as_transformers_llama(plan: Plan, tmp_path: Path) -> None:
    logits = run_ranks(plan.world_size, export_llama, plan, tmp_path)[0]
    torch.testing.assert_close(plain_logits(tmp_path, some_tokens()), logits, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def refusal(options: dict[str, Any], folder: Path) -> str:
    from shoal.models.huggingface import builder_of

    try:
        builder_of(str(folder), **options)()
    except ValueError as error:
        return str(error)
    return ""


def test_mistakes_are_told_before_anything_is_read(tmp_path: Path) -> None:
    bare, stored = toy.folder_of("llama"), toy.saved("llama", tmp_path)
    assert "model.options.fast" in refusal({"fast": True}, bare)
    assert "no *.safetensors" in refusal({"weights": True}, bare)
    assert "config.json" in refusal({}, tmp_path / "nowhere")
    assert "model.options.config.hiden_size" in refusal({"config": {"hiden_size": 3}}, bare)
    assert "use data.vocab=" in refusal({"vocab": 1000}, bare)
    assert "model.options.lora" in refusal({"lora": {"rank": 4}}, bare)
    assert "no weights for model.layers.4" in refusal({"config": {"num_hidden_layers": 5}}, stored)


def loss_after_a_step(world: World, folder: Path, precision: Any, plan: Plan) -> float:
    from shoal.models.huggingface import builder_of

    model = parallelize(builder_of(str(folder)), plan, world, precision=precision, seed=7)
    step = Step(model, NextToken(), AdamW(lr=1e-3), plan, world, precision=precision)
    batch = toy.global_batch(0)
    size = toy.BATCH // plan.data_degree
    at = plan.data_rank(world.rank) * size
    part = MicroBatch({name: x[at : at + size] for name, x in batch.items()}, at, size)
    return [step(StepBatch(index, (part,))).loss for index in range(2)][-1]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_bf16_follows_fp32_on_plans_that_cast_in_other_ways(kind: str) -> None:
    folder = toy.folder_of(kind, initializer_range=0.05)
    exact = run_ranks(1, loss_after_a_step, folder, "fp32", Plan())[0]
    for plan in (Plan(), Plan(shard=2), Plan(tensor=2)):
        found = run_ranks(plan.world_size, loss_after_a_step, folder, "bf16", plan)[0]
        assert found == pytest.approx(exact, rel=1e-2)
