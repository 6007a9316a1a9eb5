"""Under the launcher: loader processes that die, and samples that cannot be read, change no number and end no run."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Settings, parse
from shoal.launch.local import Outcome, launch
from shoal.launch.ready import make_ready
from tests.resilience.test_goes_on import Ran

STEPS = 6
MODULE = "tests.train.patchy"


def ran(folder: Path, faults: str = "", data: dict[str, Any] | None = None, **policy: Any) -> Ran:
    settings = make_ready(settings_for(folder, faults, data or {}, policy))
    assert settings.plan is not None
    return Ran(launch(settings, settings.plan.world_size, device="cpu", quiet=True), folder)


def settings_for(folder: Path, faults: str, data: dict[str, Any], policy: dict[str, Any]) -> Settings:
    return parse(
        {
            "model": {"family": f"{MODULE}:build"},
            "data": {"source": f"{MODULE}:dataset", "workers": 1} | data,
            "train": {"objective": f"{MODULE}:loss", "steps": STEPS, "global_batch": 8},
            "plan": {"replicate": 2, "micro_batch": 2, "compile": False},
            "checkpoint": {"memory_every": 1},
            "run": {"dir": str(folder), "faults": faults, "deadline_s": 20.0} | policy,
        },
        where="test",
    )


def numbers(found: Ran) -> list[tuple[Any, ...]]:

    rows = map(json.loads, (found.folder / "metrics.jsonl").read_text().splitlines())
    return [
        tuple(row.get(key) for key in ("step", "loss", "grad_norm", "samples", "eval_loss")) for row in rows
    ]


SKIP = {"on_error": "skip", "most_bad": 1.0, "options": {"bad": [4, 17, 30]}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ran]:
    from shoal.launch.ranks import Ranks
    from tests.launch.warm import start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "start", start)
        yield ran(tmp_path_factory.mktemp("undisturbed"), data=SKIP)


@pytest.mark.usefixtures("warm_nursery")
@pytest.mark.parametrize(
    "fault",
    ["loader rank=1 step=0", "loader rank=0 step=3 phase=reduce", "loader rank=1 step=2 phase=update"],
)
def test_a_loader_process_that_is_killed_costs_no_restart(
    fault: str, undisturbed: Ran, tmp_path: Path
) -> None:
    found = ran(tmp_path, fault, SKIP)
    assert found.outcome == Outcome("ok", STEPS)
    assert numbers(found) == numbers(undisturbed)
    assert found.of("fault", "rank") == found.of("restart", "number") == []
    assert found.of("loader restarted", "rank") == [int(fault.split("rank=")[1][0])]
    assert found.of("loader restarted", "reason") == ["was killed by SIGKILL"]


@pytest.mark.usefixtures("warm_nursery")
def test_a_rank_that_is_killed_goes_on_without_the_same_samples(undisturbed: Ran, tmp_path: Path) -> None:
    found = ran(tmp_path, "kill rank=1 step=3", SKIP)
    assert found.outcome == Outcome("ok", STEPS)
    assert numbers(found) == numbers(undisturbed)
    assert len(found.of("restart", "number")) == 1


@pytest.mark.usefixtures("warm_nursery")
def test_a_sample_that_kills_its_readers_is_left_out_by_the_rank_that_has_it(tmp_path: Path) -> None:
    told = {"on_error": "skip", "most_bad": 1.0, "options": {"deadly": 17}}
    found = ran(tmp_path / "deadly", data=told)
    bad = ran(tmp_path / "bad", data=told | {"options": {"bad": [17]}})
    assert found.outcome == bad.outcome == Outcome("ok", STEPS)
    assert [row[:4] for row in numbers(found)][:STEPS] == [row[:4] for row in numbers(bad)][:STEPS]
    assert found.of("bad sample", "index") == [17]
    assert len(found.of("loader restarted", "index")) == 3
    assert found.of("restart", "number") == []


@pytest.mark.usefixtures("warm_nursery")
def test_a_bad_sample_ends_the_run_with_its_name_where_nothing_else_is_said(tmp_path: Path) -> None:
    found = ran(tmp_path, data={"options": {"bad": [17]}, "workers": 0}, restarts=0)
    assert found.outcome.state == "failed"
    assert "sample 17 (epoch 0) cannot be read by rank" in found.outcome.report
    assert "OSError: no file 17.png, at " in found.outcome.report
    assert "patchy.py:" in found.outcome.report


@pytest.mark.usefixtures("warm_nursery")
def test_a_loader_is_not_killed_where_there_is_none(tmp_path: Path) -> None:
    found = ran(tmp_path, "loader rank=1 step=1", {"workers": 0}, restarts=0)
    assert found.outcome.state == "failed"
    assert "this rank has no loader process; give a dataset of your own data.workers" in found.outcome.report
