"""Other estimators' formulas give what their authors' documents do, and the kept table is what the script makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.earlier import measured
from benchmarks.estimators import (
    CALCULON,
    NAMES,
    OURS,
    Asked,
    accelerate,
    asked_of,
    compare,
    deepspeed,
    megatron,
    summary,
    table,
    times,
)
from benchmarks.estimators_calculon import Calculon
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
            assert others == {name: said for name, said in row.items() if name not in (OURS, CALCULON)}
    assert kept["summary"] == summary(kept["rows"])
    shown = (ROOT / "docs/planning.md").read_text()
    assert all(line in shown for line in table(kept).splitlines()[: 2 + len(NAMES)])
    off, on_h100s = times(kept["rows"]), kept["calculon_times"]
    assert off == on_h100s
    assert f"{100 * off['calculon']:.0f} % off" in " ".join(shown.split())
    assert f"`shoal plan` is {100 * off['shoal plan']:.0f} % off" in " ".join(shown.split())


CHECKOUT = """
class Llm:
    class Application(dict): ...
    class Execution:
        from_json = staticmethod(dict)
    def __init__(self, app, logger):
        self.app = app
    def compile(self, system, exe):
        self.exe = exe
    def run(self, system): ...
    def get_mem_tier1_cap_req(self):
        return self.app["feedforward"] * self.exe["num_procs"]
    def get_total_time(self):
        return 1.5
"""


def test_calculon_is_asked_about_plans_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "calculon/llm").mkdir(parents=True)
    (tmp_path / "systems").mkdir()
    (tmp_path / "calculon/__init__.py").touch()
    (tmp_path / "calculon/llm/__init__.py").touch()
    (tmp_path / "calculon/llm/llm.py").write_text(CHECKOUT)
    (tmp_path / "calculon/system.py").write_text("System = dict")
    system = {"networks": [{"size": 8}, {}], "mem1": {"GiB": 80}}
    (tmp_path / "systems/h100_80g_nvl8.json").write_text(json.dumps(system))
    calculon = Calculon(tmp_path)
    assert calculon.ask(DIMS, Plan(tensor=4), 8192, 1, 1) == (1.5 * 14336 * 4, 1.5)
    for plan in (Plan(shard=4), Plan(context=4, zero=1), Plan(tensor=2, recompute="selective")):
        assert calculon.ask(DIMS, plan, 8192, 1, 1) is None


def test_a_mixture_of_experts_is_not_asked_about() -> None:
    moe = [real for real in measured() if real.name.startswith("moe")]
    assert moe and all(asked_of(real) is None for real in moe)
