"""`shoal plan` says what memory a plan needs on a cluster that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app
from tests.cli.test_commands import JOB, TINY
from tests.planner.made import made_prediction


def plan(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(JOB), *TINY, *words])


def test_a_plan_that_fits_is_told_with_a_table_of_its_ranks() -> None:
    found = plan(
        "plan.pipeline=2", "model.layers=2", "plan.micro_batch=2", "plan.compile=false", "--on", "2 h100"
    )
    assert found.exit_code == 0, found.output
    assert "pipeline 2, 1f1b of 2 stages, micro-batch 2 on 2 h100" in found.output
    assert "rank 0" in found.output and "rank 1" in found.output
    for row in ("parameters", "optimizer", "activations", "peak allocated", "reserved by the allocator"):
        assert row in found.output
    assert "verdict  fits" in found.output


def test_json_is_one_document_whose_categories_add_up() -> None:
    found = plan("plan.shard=4", "plan.compile=false", "--on", "4 h100", "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    (rank,) = told["ranks"]
    assert told["fit"] == "fits" and told["cluster"] == "4 h100" and rank["stands_for"] == 4
    assert sum(rank["peak"]["by_category"].values()) == rank["allocated_bytes"] <= rank["reserved_bytes"]
    assert rank["device_bytes"] == rank["reserved_bytes"] + rank["outside_bytes"]


def test_a_plan_that_does_not_fit_exits_with_1_and_says_what_would() -> None:
    words = [
        "data.seq_len=65536",
        "data.vocab=100000",
        "train.precision=bf16",
        "plan.compile=false",
        "plan.replicate=1",
    ]
    found = plan(*words, "--on", "1 rtx4090")
    assert found.exit_code == 1, found.output
    assert "does not fit" in found.output and "try a smaller plan.micro_batch" in found.output


def test_a_plan_for_another_number_of_devices_is_refused() -> None:
    found = plan("plan.shard=4", "--on", "8 h100")
    assert found.exit_code == 2 and "4 ranks, but the cluster has 8 devices" in found.stderr


def test_a_batch_of_fewer_samples_than_ranks_is_refused() -> None:
    found = plan("plan.shard=64", "train.global_batch=8", "--on", "8x8 h100")
    assert found.exit_code == 2, found.output
    assert "train.global_batch = 8 cannot be dealt out evenly to replicate x shard = 64 ranks" in found.stderr


def test_a_cluster_that_is_not_understood_is_refused() -> None:
    found = plan("--on", "eight h100")
    assert found.exit_code == 2 and "is not understood" in found.stderr


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made predictions instead of simulations, in this process."""
    monkeypatch.setattr("shoal.planner.predict.predict", made_prediction)
    monkeypatch.setattr("shoal.planner.pool.predict", made_prediction)
    monkeypatch.setattr("shoal.planner.pool.FEW", 1000)


@pytest.mark.usefixtures("made")
def test_html_writes_a_whole_page_tells_the_plan_and_what_is_done(tmp_path: Path) -> None:
    page = tmp_path / "a page.html"
    found = plan("plan.shard=4", "--on", "4 h100", "--html", str(page))
    assert found.exit_code == 0, found.output
    text = page.read_text()
    assert text.startswith("<!doctype html>") and text.endswith("</html>\n")
    assert f"page     {page}\n" in found.stdout and "verdict  fits" in found.stdout
    done = [line for line in found.stderr.splitlines() if line.startswith("simulated ")]
    assert done[0].startswith("simulated 1 of ") and len(done) == int(done[-1].split()[1])
    assert [path.name for path in tmp_path.iterdir()] == [page.name]


@pytest.mark.usefixtures("made")
def test_a_plan_that_does_not_fit_has_its_page_and_exits_with_1_and_json_stays_alone(tmp_path: Path) -> None:
    found = plan("plan.replicate=4", "--on", "4 h100", "--json", "--html", str(tmp_path / "page.html"))
    assert found.exit_code == 1, found.output
    assert json.loads(found.stdout)["fit"] == "does not fit" and (tmp_path / "page.html").exists()


@pytest.mark.usefixtures("made")
def test_a_batch_for_which_no_plan_is_chosen_has_its_page_all_the_same(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = plan("--on", "8 h100", "--html", str(page))  # of 4 samples
    assert found.exit_code == 0, found.output
    assert "no plan is chosen: train.global_batch = 4" in found.stderr
    assert "cannot be dealt out evenly to replicate x shard = 8 ranks" in page.read_text()
    assert plan("--on", "8 h100").exit_code == 2


@pytest.mark.parametrize(("where", "why"), [("none/page.html", "there is no folder"), (".", "is a folder")])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_simulated(
    where: str, why: str, tmp_path: Path
) -> None:
    found = plan("--on", "4 h100", "--html", str(tmp_path / where))
    assert found.exit_code == 2 and why in found.stderr and not found.stdout


def test_the_largest_micro_batch_is_told_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.planner.questions.predict", made_prediction)
    words = (
        "plan.shard=2",
        "train.global_batch=16",
        "--on",
        "2 h100",
        "--largest",
        "micro_batch",
        "--price",
        "2.5",
    )
    told = plan(*words)
    assert told.exit_code == 0, told.output
    assert "largest  micro_batch 8" in told.output and "cost " in told.output
    found = json.loads(plan(*words, "--json").stdout)
    assert (found["size"], found["value"], found["too_large"]) == ("micro_batch", 8, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--largest", "width"], "micro_batch, seq_len, layers"),
        (["--largest", "layers", "--search"], "one at a time"),
        (["--smallest", "plan.shard=2"], "chooses the degrees"),
        (["--smallest", "--html", "x.html"], "leave out"),
    ],
)
def test_questions_that_are_not_one_are_refused(words: list[str], why: str) -> None:
    found = plan(*words, "--on", "2 h100")
    assert found.exit_code == 2 and why in " ".join(found.output.split())


def test_a_plan_of_devices_of_two_kinds_tells_both() -> None:
    words = ["plan.shard=2", "plan.zero=2", "plan.compile=false", "--on", "1 h100 + 1 l40s"]
    found = plan(*words, "--price", "2")
    assert found.exit_code == 0, found.output
    assert "1 h100 + 1 l40s" in found.output and "take     plan.shard=2" in found.output
    assert "cost" in found.output
    told = json.loads(plan(*words, "--json").stdout)
    assert [kind["cluster"] for kind in told["kinds"]] == ["1 h100", "1 l40s"]
    refused = plan("plan.shard=2", "--search", "--on", "1 h100 + 1 l40s")
    assert refused.exit_code == 2 and "--search is for devices of one kind" in refused.stderr
