"""Other estimators' formulas give what their authors' documents do, and the kept table is what the script makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.estimators import (
    ESTIMATORS,
    OURS,
    Asked,
    accelerate,
    asked_of,
    compare,
    deepspeed,
    megatron,
    summary,
    table,
)
from benchmarks.reality import measured
from shoal.models.presets import LlamaDims, num_parameters
from shoal.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3
DIMS = LlamaDims(4096, 32, 32, 8, 14336, 128_256, False, 5e5, 1e-5)


def ask(plan: Plan, devices: int) -> Asked:
    return Asked(DIMS, plan, devices, 1, 4, 8192)


def test_each_says_nothing_of_plans_that_it_does_not_know() -> None:
    assert deepspeed(ask(Plan(tensor=4), 4)) is None and deepspeed(ask(Plan(shard=4, zero=1), 4)) is None
    assert megatron(ask(Plan(shard=4), 4)) is None and megatron(ask(Plan(context=4), 4)) is None
    assert accelerate(ask(Plan(shard=8), 8)) == accelerate(ask(Plan(), 1))


def test_states_by_hand() -> None:
    count = num_parameters(DIMS)  # 8.03G
    assert deepspeed(ask(Plan(shard=8, zero=2), 8)) == 4 * count + 16 * count // 8
    largest = 128_256 * 4096
    assert deepspeed(ask(Plan(shard=8), 8)) == 4 * largest + 18 * count // 8
    assert accelerate(ask(Plan(), 1)) == 8 * count
    states = megatron(ask(Plan(tensor=8, replicate=1), 8)._replace(length=0))
    assert states == pytest.approx(18 * count / 8, rel=1e-3)
    cut = megatron(ask(Plan(shard=8, zero=1), 8)._replace(length=0))
    assert cut == pytest.approx((6 + 12 / 8) * count, rel=1e-3)


def test_activations_under_tensor_are_those_of_the_paper() -> None:
    """Korthikanti et al. 2022, table 2: 34 bytes a token, layer and hidden unit with sequence parallelism, ffn four-fold."""
    dims = DIMS._replace(ffn=4 * 4096, layers=1000)
    asked = Asked(dims, Plan(tensor=8), 8, 1, 1, 2048)
    found = megatron(asked)
    empty = megatron(asked._replace(length=0))
    assert found is not None and empty is not None
    assert found - empty == pytest.approx(34 * 2048 * 4096 * 1000 / 8, rel=0.01)


def test_the_kept_table_and_the_documents_are_what_the_script_makes() -> None:
    kept = json.loads((ROOT / "benchmarks/results/estimators.json").read_text())
    known = {(row["file"], row["name"], row["measured_gib"]): row["said"] for row in kept["rows"]}
    for real in measured():
        row = known.get((real.file, real.name, real.allocated_gib))
        if row is not None:  # runs that were kept since are not in it yet
            others = compare(real, {})["said"]
            assert others == {name: said for name, said in row.items() if name != OURS}
    assert kept["summary"] == summary(kept["rows"])
    shown = (ROOT / "docs/planning.md").read_text()
    assert all(line in shown for line in table(kept).splitlines()[: 3 + len(ESTIMATORS)])


def test_a_mixture_of_experts_is_not_asked_about() -> None:
    moe = [real for real in measured() if real.name.startswith("moe")]
    assert moe and all(asked_of(real) is None for real in moe)
