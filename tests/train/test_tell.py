"""What is said of a run is of the whole run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from shoal.job import Model
from shoal.models.presets import num_parameters, resolve
from shoal.plan import Plan
from shoal.train.tell import whole_parameters


def test_under_a_pipeline_the_parameters_are_those_of_all_stages() -> None:
    part = nn.Linear(3, 2)
    table = Model(preset="1m")
    training: Any = SimpleNamespace(
        model=part,
        plan=Plan(pipeline=2),
        settings=SimpleNamespace(model=table),
        datasets=SimpleNamespace(vocab=512),
    )
    assert whole_parameters(training) == num_parameters(resolve(table, 512))
    training.plan = Plan()
    assert whole_parameters(training) == 8
