"""A job's model table becomes a function that builds the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.job import Model
from shoal.models.build import builder
from shoal.models.llama import Llama


def test_a_family_is_built_with_the_tokenizers_vocabulary() -> None:
    with torch.device("meta"):
        model = builder(Model(preset="1m"), 300)()
    assert isinstance(model, Llama)
    assert model.embedding.weight.shape == (300, 128)


def test_impossible_dimensions_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"model\.heads = 3"):
        builder(Model(preset="1m", heads=3), 300)


def test_an_own_model_is_built_from_its_options() -> None:
    model = builder(Model(family="torch.nn:Linear", options={"in_features": 2, "out_features": 3}), None)()
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (3, 2)


def test_an_own_model_may_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from torch import nn\ndef build(width=2): return nn.Linear(width, 1)")
    model = builder(Model(family="net.py:build", options={"width": 5}), None)()
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5


def test_wrong_options_name_the_key_they_came_from() -> None:
    with pytest.raises(ValueError, match=r"'torch\.nn:Linear' does not take model\.options = \{'width': 3\}"):
        builder(Model(family="torch.nn:Linear", options={"width": 3}), None)()
