"""`shoal status` says in a few lines how a run is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app
from tests.cli.test_commands import JOB, TINY


def status(*words: str) -> Result:
    return CliRunner().invoke(app, ["status", *words])


@pytest.mark.usefixtures("warm_nursery")
def test_a_run_that_is_done_and_one_that_failed(tmp_path: Path) -> None:
    done, bad = tmp_path / "done", tmp_path / "bad"
    ran = CliRunner().invoke(app, ["train", str(JOB), *TINY, "plan.replicate=1", f"run.dir={done}"])
    assert ran.exit_code == 0, ran.output
    faults = ["plan.replicate=1", f"run.dir={bad}", "run.faults=raise rank=0 step=1", "run.restarts=0"]
    assert CliRunner().invoke(app, ["train", str(JOB), *TINY, *faults]).exit_code == 1
    found = status(str(done))
    assert found.exit_code == 0, found.output
    first, second, third = found.output.splitlines()
    assert first == f"{done}  finished after step 2 of 2"
    assert second.startswith("  step 2: loss ") and second.endswith("tokens/s")
    assert third == f"  saved {done}/checkpoints/step-00000002; logs of ranks in {done}/ranks"
    both = status(str(done), str(bad), "--json")
    assert both.exit_code == 1
    told = [json.loads(line) for line in both.stdout.splitlines()]
    assert [(one["state"], one["step"], one["steps"]) for one in told] == [
        ("finished", 2, 2),
        ("failed", 1, 2),
    ]
    assert told[1]["message"].startswith("rank 0 failed in step 1") and told[1]["checkpoint"] is None
    assert f"nothing was saved, so begin again: shoal train {bad}" in status(str(bad)).output


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    found = status(str(tmp_path))
    assert found.exit_code == 2 and "is no run directory" in found.stderr


def test_a_run_that_two_signals_killed_has_failed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"event": "start", "time": 1.0, "step": 0, "world_size": 1}\n'
        '{"event": "killed", "time": 2.0, "step": 3, "reason": "stopped without saving"}\n'
    )
    found = status(str(tmp_path))
    assert found.exit_code == 1 and "failed after step 3: stopped without saving" in found.output
