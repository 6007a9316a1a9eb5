"""The command line does what it is asked, says so in one line or one JSON document, and exits accordingly."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal import __version__
from shoal.cli import app
from shoal.config import json_schema, load
from shoal.launch.local import Outcome
from shoal.observe.doctor import Finding
from shoal.plan import Plan
from shoal.verify.compare import Allowed, Comparison, Difference
from shoal.verify.run import Verdict

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "quickstart.toml"
COMMANDS = sorted(str(command.name) for command in app.registered_commands)
TINY = [
    "model.preset=1m",
    "model.layers=1",
    "data.source=synthetic",
    "data.vocab=300",
    "data.seq_len=16",
    "train.steps=2",
    "train.global_batch=4",
    "train.eval_samples=4",
    "optimizer.warmup=0",
]


def shoal(*words: str) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, list(words), prog_name="shoal")


def shoal_process(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command as a person runs it."""
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_one_line(text: str) -> str:
    """One line that begins with the program's name, and no traceback."""
    assert "Traceback" not in text
    (line,) = text.splitlines()
    assert line.startswith("shoal: ")
    return line


def test_the_version_is_the_packages() -> None:
    result = shoal("--version")
    assert (result.exit_code, result.output) == (0, f"shoal {__version__}\n")


def test_without_a_command_the_commands_are_listed() -> None:
    assert all(name in shoal("--help").output for name in COMMANDS)
    assert shoal().exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_whose_words_it_takes(name: str) -> None:
    result = shoal(name, "--help")
    assert result.exit_code == 0
    example = re.search(rf"Example: shoal {name}(.*)", result.output)
    assert example
    command = next(command for command in app.registered_commands if command.name == name)
    import typer

    click_command = typer.main.get_command_from_info(
        command, pretty_exceptions_short=True, rich_markup_mode=None
    )
    words = shlex.split(example[1].partition(">")[0])
    click_command.make_context(name, words)  # raises for an unknown option or a missing argument


@pytest.mark.parametrize("name", ["train", "prepare", "sample", "doctor"])
def test_every_command_that_reports_can_do_so_in_json(name: str) -> None:
    assert "--json" in shoal(name, "--help").output


@pytest.mark.parametrize(
    "words", [["fly"], ["train"], ["train", "--fast"], ["prepare", "stdlib"], ["sample", "r", "--top-k", "0"]]
)
def test_a_wrong_use_exits_with_2(words: list[str]) -> None:
    assert shoal(*words).exit_code == 2


def test_the_schema_is_one_json_document() -> None:
    result = shoal("schema")
    assert result.exit_code == 0
    assert json.loads(result.output) == json_schema()


@pytest.mark.parametrize(("verdicts", "code"), [(["ok", "note"], 0), (["ok", "problem", "note"], 1)])
def test_doctor_reports_findings_in_json_and_exits_by_the_worst(
    verdicts: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("torch", "2.13", verdict, "means") for verdict in verdicts]  # pyrefly: ignore
    monkeypatch.setattr("shoal.observe.doctor.examine", lambda: findings)
    result = shoal("doctor", "--json")
    assert [finding["verdict"] for finding in json.loads(result.stdout)] == verdicts
    assert result.exit_code == shoal("doctor").exit_code == code


def test_train_prints_one_json_document_and_the_run_is_there(tmp_path: Path) -> None:
    ran = shoal_process("train", str(JOB), *TINY, "run.dir=r", "--json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"state": "ok", "step": 2, "run": "r", "report": ""}
    assert "loss" in ran.stderr, "progress is told beside the document"
    assert load(tmp_path / "r" / "job.toml").train.steps == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nosuch.toml"], "no job file 'nosuch.toml'"),
        ([str(JOB), "train.stepz=3"], "did you mean 'train.steps'?"),
        ([str(JOB), "train.steps"], "is not an override"),
        ([str(JOB), *TINY, "plan.shard=3"], "train.global_batch = 4"),
        ([str(JOB), *TINY, "model.preset=6m"], "model.preset = '6m'"),
        ([str(JOB), *TINY, "run.dir=file/r"], "run.dir = 'file/r' cannot be written"),
    ],
)
def test_a_job_that_cannot_be_used_is_one_line_and_exit_code_2(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from shoal.cli import main

    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr(sys, "argv", ["shoal", "train", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert named in assert_one_line(capsys.readouterr().err)


def test_the_program_itself_ends_so_too(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[train]\nsteps = = 1\n")
    ran = shoal_process("train", "job.toml", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "job.toml: not TOML" in assert_one_line(ran.stderr) and "line 2" in ran.stderr
    as_rank = shoal_process("job.toml", folder=tmp_path)  # as torchrun starts it
    assert as_rank.returncode == 2
    assert assert_one_line(as_rank.stderr) == assert_one_line(ran.stderr)


@pytest.mark.usefixtures("warm_nursery")
def test_a_run_that_fails_exits_with_1_and_has_the_report_in_the_document(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def loss(output, target):\n    raise RuntimeError('mine')\n")
    own = [f"train.objective={mine}:loss", "plan.replicate=1", f"run.dir={tmp_path / 'r'}"]
    ran = shoal("train", str(JOB), *TINY, *own, "--json")
    assert ran.exit_code == 1
    document = json.loads(ran.stdout)
    assert document["state"] == "failed"
    assert document["report"].startswith("rank 0 failed in step 0")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome("ok", 1), 0),
        (Outcome("interrupted", 1), 0),  # a machine that leaves others
        (Outcome("interrupted", 1, signal=2), 130),
        (Outcome("failed", 1), 1),
    ],
)
def test_how_a_run_ended_decides_the_exit_code(
    outcome: Outcome, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.local.launch", lambda *_, **__: outcome)
    result = shoal("train", str(JOB), *TINY, f"run.dir={tmp_path / 'r'}")
    assert result.exit_code == code


@pytest.mark.usefixtures("warm_nursery")
def test_verify_says_of_each_plan_whether_it_is_the_same() -> None:
    result = shoal("verify", str(JOB), "plan.tensor=2", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert re.search(r"^same .*gradients \de-0\d.* tensor 2", result.output, re.MULTILINE)
    assert "1 of 1 plans compute what one device does" in result.output


def test_verify_in_json_names_the_errors(tmp_path: Path) -> None:
    done = shoal_process("verify", str(JOB), "plan.shard=2", "--json", "--steps", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["same"] and found["plan"]["shard"] == 2 and 0 < found["errors"]["gradient"] < 1e-4
    assert all(found["errors"][kind] <= found["allowed"][kind] for kind in found["errors"])
    assert found["errors"].keys() == found["allowed"].keys() and "fp32" not in found


@pytest.mark.usefixtures("warm_nursery")
def test_verify_tells_plans_that_a_model_does_not_allow_and_counts_those_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    job = str(ROOT / "examples" / "digits.toml")
    every = shoal("verify", job, "--all", "2", "--steps", "1")
    assert every.exit_code == 0, every.output
    told = re.findall(r"^refused .*?(?:, and (\d+) more)?\n +(.*)", every.stdout, re.MULTILINE)
    assert len({reason for _, reason in told}) == len(told)  # each reason once
    refused = sum(1 + int(more or 0) for more, _ in told)
    assert refused > len(told) and f"; {refused} are not for this model" in every.stdout
    one = shoal("verify", job, "plan.tensor=2", "--json", "--steps", "1")
    (found,) = json.loads(one.stdout)
    assert one.exit_code == 1 and found["refused"] and "no layout" in found["problem"]


def test_verify_of_a_difference_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(0.0, 0.0, 0.5, "head.weight", 0.0, Difference("loss", 1, 0.5, 1e-6))
    monkeypatch.setattr(
        "shoal.verify.run.verify", lambda settings, plans, told, **_: [Verdict(plans[0], comparison)]
    )
    assert shoal("verify", str(JOB), "plan.shard=2").exit_code == 1


def test_verify_tells_what_is_allowed_behind_each_error_and_a_narrow_job_in_fp32_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Comparison(1e-3, 2e-3, 3e-3, "head.weight", 4e-3, None, 0.5, Allowed(5e-2, 6e-2, 7e-2, 8e-2))
    sharper = own._replace(gradient=1e-6, allowed=Allowed(2e-6, 2e-6, 9e-6, 2e-6))
    verdict = Verdict(Plan(shard=2), own, sharper=sharper)

    def verify(
        settings: object, plans: object, told: Callable[[Verdict], None], **_: object
    ) -> list[Verdict]:
        told(verdict)
        return [verdict]

    monkeypatch.setattr("shoal.verify.run.verify", verify)
    lines = shoal("verify", str(JOB), "plan.shard=2").stdout.splitlines()
    assert lines[0].startswith(
        "same       loss 1e-03 (5e-02)  norm 2e-03 (6e-02)  gradients 3e-03 (7e-02)  w"
    )
    assert lines[1].startswith("  in fp32  loss 1e-03 (2e-06)") and "gradients 1e-06 (9e-06)" in lines[1]
    (found,) = json.loads(shoal("verify", str(JOB), "plan.shard=2", "--json").stdout)
    assert found["allowed"]["weights"] == 8e-2
    assert found["fp32"]["errors"]["gradient"] == 1e-6 and found["fp32"]["allowed"]["gradient"] == 9e-6


def test_prepare_makes_a_folder_that_a_job_can_name(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("many are a shoal. " * 50)
    out = tmp_path / "tokens"
    words = [
        "prepare",
        str(tmp_path / "text.txt"),
        "--out",
        str(out),
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    told = shoal(*words)
    assert told.exit_code == 0, told.output
    assert f"data.source={out}" in told.output
    document = json.loads(shoal(*words, "--json").stdout)
    assert document["vocab"] == 257
    assert document["splits"]["train"]["documents"] == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nosuch", "--out", "d"], "nosuch"),
        (["stdlib", "--out", "d", "--vocab", "3"], "data.vocab = 3"),
        (["stdlib", "--out", "d", "--eval-fraction", "2"], "data.eval_fraction = 2.0"),
        (["stdlib", "--out", "d", "--tokenizer", "words"], "words"),
    ],
)
def test_what_cannot_be_prepared_is_one_line_and_exit_code_2(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shoal("prepare", *words)
    assert result.exit_code == 2
    assert named in assert_one_line(result.stderr)
    assert list(tmp_path.iterdir()) == []


def test_sampling_from_what_is_no_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = shoal("sample", str(tmp_path))
    assert result.exit_code == 2
    assert "is no run directory" in assert_one_line(result.stderr)
