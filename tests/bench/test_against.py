"""`shoal bench step`: one run from the command line to its files, and what is refused before anything starts."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.setting import JOBS, read_setting
from shoal.bench.against import find_checkout, read_names, require_equal_work
from shoal.bench.figures import Amount, figures
from shoal.bench.show import against_table, headline, markdown_table
from shoal.cli import app
from shoal.config import Settings, load
from shoal.launch.ready import make_ready
from shoal.models.presets import num_parameters, resolve

ROOT = Path(__file__).parents[2]
TINY = str(JOBS / "tiny.toml")
SMALL = ["model.layers=1", "data.seq_len=16", "cluster=2 cpu"]


def shoal(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "step", *words], prog_name="shoal")


def test_the_product_and_a_peer_are_rows_with_equal_losses(tmp_path: Path) -> None:
    words = [*SMALL, "plan.replicate=2", "--against", "fsdp2,megatron", "--steps", "2", "--warmup", "1"]
    result = shoal(TINY, *words, "--profile", "--json", "--out", str(tmp_path))
    rows = json.loads(result.stdout)["rows"]
    own, fsdp2, megatron = rows
    assert [row["name"] for row in rows] == ["shoal", "fsdp2", "megatron"]
    assert "skipped" in megatron["error"]
    assert result.exit_code == 1  # a row without figures
    assert own["losses"][0] == pytest.approx(math.log(512), abs=0.1)  # random weights guess evenly
    assert fsdp2["losses"] == pytest.approx(own["losses"], rel=1e-3)
    for row in (own, fsdp2):
        assert (len(row["seconds"]), len(row["losses"])) == (2, 3)
        assert row["step_s"] == pytest.approx(statistics.median(row["seconds"]), abs=1e-6)
        assert row["per_s_per_device"] == pytest.approx(4 * 16 / row["step_s"], rel=1e-2)
    assert own["data_wait_s"] >= 0
    _assert_profiled(own["profile"])
    assert (tmp_path / "logs" / "shoal" / "trace-rank1.json.gz").exists()
    assert json.loads((tmp_path / "against.json").read_text())["rows"] == rows
    assert "- **megatron**: skipped" in (tmp_path / "against.md").read_text()


def _assert_profiled(profile: dict[str, Any]) -> None:
    lines = {line["name"]: line for line in profile["lines"]}
    assert lines["matmul"]["median"] > 0
    assert lines["communication"]["median"] > 0  # copies add up gradients
    assert len(profile["ranks"]) == 2
    for rank in profile["ranks"]:
        parts = rank["computing_ms"] + rank["exposed_ms"] + rank["gaps_ms"]
        assert parts == pytest.approx(rank["step_ms"])


def test_help_has_an_example() -> None:
    assert "Example: shoal bench step examples/quickstart.toml" in shoal("--help").output


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("torchtitan,nonsense", r"nonsense: no such peer; peers: fsdp2, ddp, torchtitan"),
        ("deepspeed:3", r"'3' is no option; expected key=value"),
        ("deepspeed:stage=4", r"stage=4 is not known; it takes stage=auto\|1\|2\|3; recompute="),
        ("fsdp2:stage=3", r"stage=3 is not known; it takes no options"),
    ],
)
def test_a_peer_that_is_not_there_is_refused_with_those_that_are(names: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_names(names, ROOT)


def test_options_follow_a_name_which_may_come_twice() -> None:
    first, second = read_names("deepspeed:stage=3:recompute=full,deepspeed", ROOT)
    assert (first.title, first.options) == ("deepspeed:stage=3:recompute=full", ("stage=3", "recompute=full"))
    assert second.known is first.known


def test_an_installed_package_says_that_peers_need_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_checkout() == ROOT
    monkeypatch.setattr("shoal.bench.against.__file__", str(tmp_path / "shoal" / "bench" / "against.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="are in a checkout of the repository"):
        find_checkout()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["optimizer.schedule=cosine"], "add optimizer.name=adamw optimizer.schedule=constant"),
        (["train.global_batch=16"], r"add train\.global_batch=8"),
        (["train.precision=fp16"], r"add train\.precision=bf16"),
        (["model.family=moe", "model.preset=4x1m"], 'peers train model.family = "llama"'),
    ],
)
def test_a_job_that_peers_cannot_train_is_refused_with_what_to_change(words: list[str], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        require_equal_work(ready(TINY, "plan.shard=2", *words))


def ready(job: str, *words: str) -> Settings:
    return make_ready(load(job, ["cluster=2 cpu", *words]))


@pytest.mark.parametrize(
    ("name", "parameters", "tokens_per_rank"),
    [
        ("llama_8b", 8_030_261_248, 8192),
        ("llama_1b", 1_235_814_400, 8192),
        ("llama_433m", 432_563_200, 2048),
        ("llama_150m", 150_000_000, 8192),
    ],
)
def test_the_jobs_have_the_dimensions_that_they_are_named_after(
    name: str, parameters: int, tokens_per_rank: int
) -> None:
    settings = load(JOBS / f"{name}.toml")
    found = num_parameters(resolve(settings.model, settings.data.vocab))
    assert found == pytest.approx(parameters, rel=0.03)
    setting = read_setting(JOBS / f"{name}.toml", ranks=4, steps=20, warmup=5)
    assert setting.micro_batch * settings.data.seq_len == tokens_per_rank
    assert settings.plan is not None
    assert settings.plan.micro_batch == setting.micro_batch


def test_figures_are_medians_with_their_spread() -> None:
    found = figures([0.1, 0.2, 0.3, 0.4], Amount(512, "tokens", 2, 1e6, 1e8))
    assert (found["step_s"], found["per_s_per_device"], found["mfu"]) == (0.25, 1024, 0.04)
    assert found["step_s_quartiles"] == [0.125, 0.375]
    assert found["step_s_range"] == [0.1, 0.4]
    assert figures([0.1, 0.2], Amount(512, "tokens", 2, None, 1e8))["mfu"] is None


def test_losses_stand_beside_speeds_at_steps_that_all_rows_took() -> None:
    row = {"setting": "s", "step_s": 0.2, "per_s_per_device": 40960.4}
    text = against_table(
        [
            {"name": "short", **row, "losses": [9.0, 8.0, 7.0, 6.0]},
            {"name": "long", **row, "losses": [9.1, 8.1, 7.1, 6.1, 5.1, 4.1]},
            {"name": "bad", "setting": "s", "error": "\nexit code 1: boom\nmore"},
        ]
    )
    assert "| loss 1 | loss 2 | loss 4 |" in text
    assert "| 9.1000 | 8.1000 | 6.1000 |" in text
    assert "|   200.0 |       40,960 |" in text
    assert text.endswith("- **bad**: exit code 1: boom")
    assert headline("") == "no message"


def test_a_table_lines_up_and_escapes_bars() -> None:
    assert markdown_table(["row", "W"], [["a|b", "1"], ["c", "700"]]).splitlines() == [
        "| row  |   W |",
        "|------|----:|",
        "| a\\|b |   1 |",
        "| c    | 700 |",
    ]
