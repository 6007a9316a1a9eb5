"""Every example runs as it stands; the digits give the same losses by job file and by script, on 1 and on 2 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from examples import same_numbers
from shoal import World
from shoal.cli import app
from shoal.run import Run, read_json_lines
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.usefixtures("warm_nursery", "in_root")
TINY = (
    "model.preset=1m model.layers=1 data.source=docs data.tokenizer=bytes data.seq_len=32 optimizer.warmup=0"
)
FEW_STEPS = {
    "quickstart.toml": [*TINY.split(), "train.steps=2", "train.eval_samples=4"],
    "huggingface.toml": [*TINY.split()[2:], "train.steps=2", "train.eval_samples=4"],
    "digits.toml": ["train.steps=12", "train.eval_every=5"],
}
STEPS = 12
# Sums over 2 ranks are taken in another order: about 2^-24 a sum in fp32, which 12 steps of AdamW, dividing small numbers
# by small numbers, let grow.
TOLERANCE = 1e-4


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


class Trained(NamedTuple):
    losses: list[float]
    eval_loss: float


def train(example: str, folder: Path, *words: str) -> Trained:
    """What `shoal train` measured; that it is a program is for the tests of the command line."""
    words = (*FEW_STEPS[example], f"run.dir={folder / 'run'}", f"run.cache={folder / 'cache'}", *words)
    ran = CliRunner().invoke(app, ["train", f"examples/{example}", *words, "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["state"] == "ok"
    records = list(read_json_lines(Run(folder / "run").metrics_file))
    losses = [record["loss"] for record in records if "loss" in record]
    return Trained(losses, records[-1]["eval_loss"])


def test_every_job_file_has_a_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.toml")} == set(FEW_STEPS)


def test_quickstart_trains(tmp_path: Path) -> None:
    trained = train("quickstart.toml", tmp_path)
    assert len(trained.losses) == 2
    assert 5 < trained.losses[0] < 6  # about log 257


def test_a_model_of_transformers_trains_from_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trained = train("huggingface.toml", tmp_path)
    assert len(trained.losses) == 2
    assert 7 < trained.losses[0] < 8.5  # about log 2048


def _losses(world: World, steps: int) -> list[float]:
    from examples.digits import losses

    return list(losses(world, steps))


def test_digits_give_the_same_losses_by_job_file_and_by_script_on_1_and_2_ranks(tmp_path: Path) -> None:
    alone = run_ranks(1, _losses, STEPS)[0]
    assert len(alone) == STEPS
    assert alone[-1] < alone[0]
    for losses in run_ranks(2, _losses, STEPS):
        assert losses == pytest.approx(alone, rel=TOLERANCE)
    one = train("digits.toml", tmp_path / "1", "plan.replicate=1")
    two = train("digits.toml", tmp_path / "2", "plan.shard=2")
    assert one.losses == pytest.approx(alone, rel=TOLERANCE)
    assert two.losses == pytest.approx(alone, rel=TOLERANCE)
    assert two.eval_loss == pytest.approx(one.eval_loss, rel=TOLERANCE)


def test_the_digits_script_as_it_stands_reads_nine_of_ten_digits_it_has_not_seen() -> None:
    ran = subprocess.run(
        [sys.executable, "examples/digits.py"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads of so small a model mostly wait for each other
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    word, accuracy, *_ = ran.stdout.splitlines()[-1].split()
    assert word == "accuracy"
    assert float(accuracy) > 0.9


def here(command: list[str], **_: object) -> None:
    """A `shoal` command that a script starts, in this process."""
    assert command[:3] == [sys.executable, "-m", "shoal"]
    done = CliRunner().invoke(app, command[3:])
    assert done.exit_code == 0, done.output


def test_the_table_of_same_numbers_has_equal_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["same_numbers.py", "--steps=2", "--only=2"])
    monkeypatch.setattr(subprocess, "run", here)
    same_numbers.main()
    one, two = capsys.readouterr().out.splitlines()[2:]
    numbers = [[float(cell) for cell in row.split("|")[2:-1]] for row in (one, two)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    assert numbers[0][0] == pytest.approx(7.67, abs=0.05)  # ln(2048) and a little, since the head is tied
