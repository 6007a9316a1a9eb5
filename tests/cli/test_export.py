"""`shoal export` writes what transformers reads, from runs of our family and of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal.cli import app
from tests.cli.test_commands import ROOT, TINY

pytest.importorskip("transformers")

TEXT = ["data.source=docs", "data.tokenizer=bytes", *(word for word in TINY if not word.startswith("data.s"))]
OURS = [word for word in TEXT if not word.startswith("data.vocab")]
THEIRS = [word for word in OURS if not word.startswith("model.")] + [f"model.family=hf:{ROOT}/examples/qwen3"]


@pytest.mark.usefixtures("warm_nursery")
@pytest.mark.parametrize(("words", "kind"), [(OURS, "LlamaForCausalLM"), (THEIRS, "Qwen3ForCausalLM")])
def test_a_run_is_exported_with_its_tokenizer_and_samples_alike(
    words: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from shoal.train.sample import open_run

    job = tmp_path / "job.toml"
    job.write_text(f'[data]\nsource = "{ROOT}/docs"\n')
    words = [word for word in words if word != "data.source=docs"] + [
        "data.seq_len=16",
        f"run.dir={tmp_path}/run",
        f"run.cache={tmp_path}/cache",
    ]
    ran = CliRunner().invoke(app, ["train", str(job), *words, "plan.shard=2"])
    assert ran.exit_code == 0, ran.output
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", "run", "out", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"step": 2, "folder": "out"}
    model = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    assert type(model).__name__ == kind
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained("out")
    tokens = torch.tensor([tokenizer("the shoal swims")["input_ids"]])
    trained = open_run(Path("run"))
    assert trained.tokenizer.encode("the shoal swims").ids == tokens[0].tolist()
    assert tokenizer.eos_token_id == trained.end_of_text
    assert model.config.eos_token_id == model.generation_config.eos_token_id == trained.end_of_text
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trained.model.eval()(tokens), rtol=1e-5, atol=1e-5)


def made_model(folder: Path) -> None:
    """A small model with weights, a tokenizer with a template of chats, and what it says of generating."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<pad>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters.train_from_iterator(["a shoal of fish swims"] * 4, trainer)
    own: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<end>", pad_token="<pad>"
    )
    own.chat_template = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    own.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=0, bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.GenerationConfig(
        eos_token_id=[0, 2], pad_token_id=1, do_sample=True, top_k=7
    ).save_pretrained(folder)


@pytest.mark.usefixtures("warm_nursery")
def test_a_model_that_is_trained_on_keeps_its_tokenizer_and_what_it_says_of_generating(
    tmp_path: Path,
) -> None:
    import transformers

    made_model(tmp_path / "own")
    job = tmp_path / "job.toml"
    job.write_text(f'[data]\nsource = "{ROOT}/docs"\n')
    words = [
        word for word in THEIRS if not word.startswith(("data.source", "data.tokenizer", "model.family"))
    ]
    words += [
        f"model.family=hf:{tmp_path}/own",
        "data.seq_len=16",
        f"run.dir={tmp_path}/run",
        f"run.cache={tmp_path}/cache",
    ]
    ran = CliRunner().invoke(app, ["train", str(job), *words, "plan.replicate=1"])
    assert ran.exit_code == 0, ran.output
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(out)])
    assert done.exit_code == 0, done.output
    was: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    found: Any = transformers.AutoTokenizer.from_pretrained(out)
    assert found.chat_template == was.chat_template and found.pad_token_id == 1 and found.eos_token_id == 0
    assert found("a shoal <turn>")["input_ids"] == was("a shoal <turn>")["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == [0, 2] and model.generation_config.top_k == 7
    assert model.config.pad_token_id == 1


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no run directory" in result.output
