"""The examples in the docstrings and in docs/data.md run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal.data
from shoal.data.prepare import prepare
from shoal.job import Data

MODULES = sorted(path.stem for path in Path(shoal.data.__path__[0]).glob("*.py") if path.stem != "__init__")
PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        Path("notes").mkdir(exist_ok=True)
        Path("notes", f"{number}.txt").write_text(f"note {number}, long enough to be read")
    prepare(Data(source="notes", tokenizer="bytes"), 0, Path("tokens"))
    found = doctest.testmod(importlib.import_module(f"shoal.data.{name}"))
    assert found.failed == 0


def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    snippets = SNIPPET.findall(PAGE.read_text(encoding="utf-8"))
    assert len(snippets) > 4
    (tmp_path / "page.py").write_text("\n".join(snippets), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


def test_only_modules_that_need_torch_import_it() -> None:
    code = (
        "import sys, shoal.data.prepare, shoal.data.format, shoal.data.sampler, shoal.data.cut; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PAGE.parents[1]).returncode == 0
