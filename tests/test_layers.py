"""Imports flow down: what is below knows nothing of what is above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shoal

HOME = Path(shoal.__file__).parent
LAYERS = ("models", "parallel", "train", "launch", "cli")
"""from the lowest to the highest"""


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_a_layer_imports_nothing_from_those_above(layer: str) -> None:
    above = tuple(f"shoal.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :])
    found = [
        f"{path.relative_to(HOME)}:{node.lineno} imports {node.module}"
        for path in (HOME / layer).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and f"{node.module}.".startswith(tuple(f"{name}." for name in above))
    ]
    assert found == []
