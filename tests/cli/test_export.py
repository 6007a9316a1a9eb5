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
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trained.model.eval()(tokens), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "no run directory" in result.output
