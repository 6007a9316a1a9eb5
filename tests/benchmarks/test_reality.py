"""Rows that are measured by one command, and predicted from the file that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shoal.planner
from benchmarks.reality import Real, of_one_command, predict, summary
from benchmarks.reality_measure import rows, tables_of
from shoal.config import parse

PROFILES = Path(shoal.planner.__file__).parent / "profiles"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tiny", [False, True])
def test_rows_are_jobs_of_so_many_ranks(ranks: int, tiny: bool) -> None:
    found = rows(ranks)
    assert len({row.name for row in found}) == len(found) >= 24
    for row in found:
        settings = parse(tables_of(row, tiny), where=row.name)
        assert settings.plan is not None
        assert settings.plan.world_size == ranks, row.name
        count, size = settings.plan.micro_batches(settings.job.train.global_batch)
        assert count * size * settings.plan.data_degree == settings.job.train.global_batch, row.name


def test_tiny_rows_are_neither_compiled_nor_recorded() -> None:
    for row in rows(2):
        plan = parse(tables_of(row, tiny=True), where=row.name).plan
        assert plan is not None
        assert not plan.compile, row.name
        assert not plan.cuda_graphs, row.name


def test_what_was_measured_is_read_with_its_job(tmp_path: Path) -> None:
    row, other = rows(2)[:2]
    figures = {"step_s": 0.5, "allocated_gib": 1.5, "reserved_gib": 2.0}
    kept = {
        "machine": {"devices": 8, "device": "NVIDIA H200"},
        "ranks": 2,
        "size": "full",
        "rows": [{"name": row.name, **figures}, {"name": other.name, "problem": "no memory"}],
    }
    (tmp_path / "found.json").write_text(json.dumps(kept))
    (found,) = of_one_command(tmp_path / "found.json")
    assert (found.name, found.job, found.on) == (row.name, tables_of(row), "2 h200")
    assert (found.step_s, found.allocated_gib, found.reserved_gib) == (0.5, 1.5, 2.0)


def test_rows_are_predicted_by_the_profile_of_their_file(tmp_path: Path) -> None:
    """The same devices, with matrices that take twice as long."""
    said = []
    for factor in (1.0, 2.0):
        profile = json.loads((PROFILES / "cpu.json").read_text())
        profile["matmuls"] = [[*dims, factor * seconds] for *dims, seconds in profile["matmuls"]]
        job = tables_of(rows(1)[0], tiny=True) | {"plan": {"micro_batch": 4, "compile": False}}
        real = Real("file", "name", job, [], "1 cpu", 1.0, 1.0, 1.0, json.dumps(profile))
        found = predict(real)
        assert "problem" not in found
        said.append(found["parts"]["matmul"])
    assert said[1] > 1.5 * said[0]


def test_errors_are_summed_up_without_their_signs() -> None:
    records = [{"step_s": {"error": error}} for error in (-0.1, 0.02, 0.06)]
    assert summary(records) == {"step_s": {"rows": 3, "mean": 0.06, "median": 0.06, "worst": 0.1}}
