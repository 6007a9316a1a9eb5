"""Each step is one line that any JSON reader takes, and a resumed run has each step once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.observe.metrics import Metrics, MetricsWriter, forget_after, memory_bytes
from shoal.run import Run, read_json_lines
from shoal.world import World
from tests.ranks import run_ranks


def metrics(step: int = 1, **changes: Any) -> Metrics:
    made = Metrics(
        step=step,
        loss=2.5,
        grad_norm=0.5,
        lr=1e-3,
        units=1000,
        seconds=0.5,
        mfu=0.41238,
        memory_bytes=123,
        skipped=False,
        unit="tokens",
    )
    return made._replace(**changes)


def new_run(path: Path) -> Run:
    run = Run(path)
    run.create()
    return run


def test_a_line_has_the_fields_of_a_step() -> None:
    record = metrics().record()
    assert abs(record.pop("time") - time.time()) < 60
    assert record == {
        "step": 1,
        "loss": 2.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 1000,
        "seconds": 0.5,
        "tokens_per_s": 2000.0,
        "mfu": 0.4124,
        "memory": 123,
    }


def test_a_line_is_told_in_what_the_loss_is_a_mean_of() -> None:
    record = metrics(unit="samples").record()
    assert (record["samples"], record["samples_per_s"]) == (1000, 2000.0)
    assert "tokens" not in record


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_null_and_the_line_is_strict_json(value: float, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    MetricsWriter(run, 0, tensorboard=False).write(metrics(loss=value, grad_norm=value, skipped=True))
    line = run.metrics_file.read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    record = json.loads(line, parse_constant=refuse)
    assert (record["loss"], record["grad_norm"], record["skipped"]) == (None, None, True)


def test_a_step_of_no_time_has_no_rate() -> None:
    assert metrics(seconds=0.0).record()["tokens_per_s"] == 0.0


def test_every_rank_writes_its_own_file_and_rank_0_the_runs(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for rank in (0, 1):
        writer = MetricsWriter(run, rank, tensorboard=False)
        writer.write(metrics(1, memory_bytes=rank))
        writer.write_eval(1, loss=3.0, weight=50, seconds=0.25)
        writer.close()
    assert [record.get("loss") for record in read_json_lines(run.metrics_file)] == [2.5, None]
    assert list(read_json_lines(run.metrics_file))[1] == {
        "step": 1,
        "eval_loss": 3.0,
        "eval_weight": 50,
        "seconds": 0.25,
    }
    for rank in (0, 1):
        own = list(read_json_lines(run.ranks / f"{rank}.jsonl"))
        assert own == [{"step": 1, "seconds": 0.5, "memory": rank}]


def test_a_resumed_run_forgets_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    writer = MetricsWriter(run, 0, tensorboard=False)
    for step in range(1, 8):
        writer.write(metrics(step))
        writer.write_eval(step, 1.0, 1, 0.0)
    before = list(read_json_lines(run.metrics_file))
    own = run.ranks / "0.jsonl"
    assert len(list(read_json_lines(own))) == 7
    forget_after(run, 0, 4)
    assert [record["step"] for record in read_json_lines(own)] == [1, 2, 3, 4]
    assert list(read_json_lines(run.metrics_file)) == [record for record in before if record["step"] <= 4]
    for step in range(5, 8):
        writer.write(metrics(step))
        writer.write_eval(step, 1.0, 1, 0.0)
    after = list(read_json_lines(run.metrics_file))
    assert [timeless(record) for record in after] == [timeless(record) for record in before]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "time"}


def test_a_new_run_has_nothing_to_forget(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    forget_after(run, 0, 0)
    assert not run.metrics_file.exists()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(new_run(tmp_path), 0, tensorboard=True)
    for step in (1, 2):
        writer.write(metrics(step, loss=float(step)))
    writer.write_eval(2, loss=7.0, weight=1, seconds=0.1)
    writer.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
    assert [(event.step, event.value) for event in read.Scalars("eval_loss")] == [(2, 7.0)]


def hold_and_free(world: World, size: int) -> int:
    before = memory_bytes(world.device)
    held = torch.ones(size, dtype=torch.uint8)
    del held
    return memory_bytes(world.device) - before


def test_memory_of_a_cpu_rank_is_the_most_that_the_process_held() -> None:
    size = 256 * 2**20
    assert run_ranks(1, hold_and_free, size)[0] > 0.9 * size
