"""Importing shoal is fast and touches no device; nouns need nothing but themselves."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest


def loaded_by(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def shoal_modules(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("shoal.")} - {"shoal.version"}


@pytest.mark.parametrize("noun", ["job", "plan", "cluster"])
def test_a_noun_needs_neither_torch_nor_the_rest_of_shoal(noun: str) -> None:
    names = loaded_by(f"import shoal.{noun}")
    assert shoal_modules(names) == {f"shoal.{noun}"}
    assert not names & {"torch", "numpy"}


@pytest.mark.parametrize(
    "module",
    ["run", "config", "check", "imports", "models.presets", "planner.choose", "cli", "train.schedule"],
)
def test_what_is_settled_before_a_run_needs_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import shoal.{module}")


def test_importing_shoal_loads_nothing_and_takes_less_than_three_tenths_of_a_second() -> None:
    assert not loaded_by("import shoal") & {"torch", "numpy", "pydantic", "rich", "typer"}

    def seconds(statement: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - begin

    # the best of a few, less a bare interpreter's: other processes may have the cores
    took = min(seconds("import shoal") for _ in range(5)) - min(seconds("") for _ in range(5))
    assert took < 0.3


def test_every_public_name_is_there_and_another_is_refused_with_the_list() -> None:
    import shoal

    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert set(dir(shoal)) == set(shoal.__all__)
    with pytest.raises(AttributeError, match=r"'shoal' has no 'Trainer'; it has .*Step"):
        _ = shoal.Trainer  # pyrefly: ignore[missing-attribute]
