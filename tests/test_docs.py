"""The pages on job, plan, run and models are up to date, and what they show runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shoal.config import Settings, apply_overrides, keys, load, parse
from shoal.models.presets import PRESET_NAMES
from shoal.plan import Plan

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["job.md", "plan.md", "run.md", "models.md", "checkpoints.md"]


def snippets(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_generated_tables_are_up_to_date() -> None:
    ran = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}run python docs/generate.py"


def test_every_key_and_preset_is_on_its_page() -> None:
    job, models = ((DOCS / page).read_text() for page in ("job.md", "models.md"))
    for table, names in keys().items():
        section = job.split(f"### `[{table}]`" if table else "Outside any table:")[1].split("###")[0]
        for name in names:
            assert f"| `{name}` |" in section, f"{table}.{name}"
    for preset in PRESET_NAMES:
        assert f"| `{preset}` |" in models


@pytest.mark.parametrize("page", PAGES)
def test_python_on_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n".join(snippets(page, "python")), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ran = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    for printed in re.findall(r"^ *print\(.*\)  # (.*)$", (tmp_path / "page.py").read_text(), re.MULTILINE):
        assert printed in ran.stdout


@pytest.mark.parametrize("page", PAGES)
def test_job_files_on_a_page_are_job_files(page: str) -> None:
    for text in snippets(page, "toml"):
        assert parse(tomllib.loads(text), where=page) != Settings()


def test_commands_on_the_job_page_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [line for text in snippets("job.md", "bash") for line in text.splitlines()]
    loaded = [load(path, words) for _, _, path, *words in map(shlex.split, lines)]
    assert loaded[0].data.source == ["docs", "shoal"]
    assert loaded[1].plan == Plan(micro_batch=4)


def test_text_that_looks_like_a_number_can_be_quoted_as_the_page_says() -> None:
    words = shlex.split("""run.dir='"12"'""")
    assert "run.dir='\"12\"'" in (DOCS / "job.md").read_text()
    assert parse(apply_overrides({}, words), where="page").run.dir == "12"
