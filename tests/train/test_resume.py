"""A run goes on only where the numbers of its done steps stay true."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shoal.train.loop
from shoal.checkpoint.folder import CheckpointError, list_checkpoints
from shoal.checkpoint.store import load
from shoal.config import Settings
from shoal.config import load as load_settings
from shoal.plan import Plan
from shoal.run import read_json_lines
from shoal.train.resume import require_same_numbers
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.test_loop import STEPS, losses, run, settings_for


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run_ranks(1, run, settings_for(folder, Plan(), checkpoint={"every": 4, "keep": 3}))
    return folder


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ({"model": {"ffn": 64}}, "model.ffn was 48 and is now 64"),
        ({"model": {"preset": "1m"}}, 'model.preset was left out and is now "1m"'),
        ({"train": {"seed": 1}}, "train.seed was 0 and is now 1"),
        ({"train": {"precision": "bf16"}}, 'train.precision was "fp32" and is now "bf16"'),
        ({"data": {"seq_len": 8}}, "data.seq_len was 16 and is now 8"),
        ({"optimizer": {"name": "sgd"}}, 'optimizer.name was "adamw" and is now "sgd"'),
    ],
)
def test_another_job_is_refused_by_what_it_changes_with_what_can_be_done(
    table: dict, change: str, done: Path
) -> None:
    last = list_checkpoints(done / "checkpoints")[0][-1]
    with pytest.raises(ValueError, match="another job than this one") as caught:
        require_same_numbers(last, settings_for(done, Plan(), **table).job)
    text = str(caught.value)
    assert str(last.path) in text and change in text
    assert f"give {change.partition(' ')[0]} the old value again" in text
    assert "another run.dir, or run.resume=false" in text


def test_a_rank_refuses_another_job_too_and_tells_all_that_changed(done: Path) -> None:
    tables: dict = {"train": {"global_batch": 4}, "data": {"seq_len": 8}}
    with pytest.raises(ValueError, match="of another job than this one") as caught:
        run_ranks(1, run, settings_for(done, Plan(), **tables))
    assert "data.seq_len was 16 and is now 8; train.global_batch was 8 and is now 4" in str(caught.value)
    assert "give these 2 keys the old value" in str(caught.value)


def test_more_steps_and_another_rate_are_taken_up(done: Path) -> None:
    run_ranks(1, run, settings_for(done, Plan(), train={"steps": STEPS + 3}, optimizer={"lr": 1e-3}))
    assert [step for step, _, _ in losses(done)] == list(range(1, STEPS + 4))
    assert list_checkpoints(done / "checkpoints")[0][-1].step == STEPS + 3


def test_beginning_anew_sets_aside_what_was_there(done: Path) -> None:
    before = losses(done)
    run_ranks(1, run, settings_for(done, Plan(), run={"resume": False}, train={"seed": 1}))
    assert losses(done / "earlier-1") == before
    assert [c.step for c in list_checkpoints(done / "earlier-1" / "checkpoints")[0]] == [4, 8, 12]
    assert len(losses(done)) == STEPS and losses(done) != before
    assert [c.step for c in list_checkpoints(done / "checkpoints")[0]] == [12]


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit])
def test_a_damaged_newest_checkpoint_is_left_out_and_said(damage: Callable[[Path], None], done: Path) -> None:
    reference = losses(done)
    file = done / "checkpoints" / "step-00000012" / "rank-00000.bin"
    damage(file)
    run_ranks(1, run, settings_for(done, Plan()))
    assert losses(done) == reference  # steps 9 to 12 were taken again, to the bit
    refused = [event for event in events(done) if event["event"] == "checkpoint refused"]
    assert refused and re.search(rf"{file.name}.*'(model|optimizer)\.", refused[0]["reason"])


def test_a_run_whose_every_checkpoint_is_damaged_does_not_quietly_begin_anew(done: Path) -> None:
    for file in (done / "checkpoints").glob("*/rank-00000.bin"):
        flip_a_bit(file)
    with pytest.raises(CheckpointError, match=r"run\.resume=false begins anew"):
        run_ranks(1, run, settings_for(done, Plan()))
    assert len(list_checkpoints(done / "checkpoints")[0]) == 3


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / "events.jsonl"))


def run_with_a_full_disk(world: World, settings: Settings, full_at: list[int]) -> None:
    real = shoal.train.keep.save

    def save_or_not(folder: Path, step: int, *rest: Any, **keys: Any) -> Path:
        if step not in full_at:
            return real(folder, step, *rest, **keys)
        with patch("shoal.checkpoint.parts._write_part", side_effect=OSError(28, "No space left on device")):
            return real(folder, step, *rest, **keys)

    with patch("shoal.train.keep.save", save_or_not):
        run(world, settings)


def test_a_run_goes_on_when_a_checkpoint_does_not_fit_on_the_disk(finished: Path, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, Plan(), checkpoint={"every": 4, "keep": 3, "asynchronous": False})
    run_ranks(1, run_with_a_full_disk, settings, [8])
    assert losses(tmp_path) == losses(finished)
    assert [c.step for c in list_checkpoints(tmp_path / "checkpoints")[0]] == [4, 12]
    (failed,) = [event for event in events(tmp_path) if event["event"] == "save failed"]
    assert failed["step"] == 8
    assert re.search(
        r"No space left on device; it needs [\d,]+ bytes .*[\d,]+ bytes .* were free", failed["reason"]
    )


def test_a_run_whose_last_checkpoint_does_not_fit_fails(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No space left on device"):
        run_ranks(1, run_with_a_full_disk, settings_for(tmp_path, Plan(), checkpoint={"every": 4}), [12])
    assert [c.step for c in list_checkpoints(tmp_path / "checkpoints")[0]] == [4, 8]


def test_a_run_that_is_done_trains_no_step_and_ends_well(done: Path) -> None:
    before = losses(done)
    run_ranks(1, run, settings_for(done, Plan()))
    assert losses(done) == before


def test_a_checkpoint_that_cannot_be_written_names_the_folder_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(Exception, match=r"checkpoints") as caught:
        run_ranks(2, run, settings_for(tmp_path, Plan(replicate=2)))
    assert str(tmp_path) in str(caught.value)


def test_every_run_leaves_a_report_and_what_it_was(finished: Path) -> None:
    for name in ("job.toml", "plan.toml", "cluster.toml", "report.html", "metrics.jsonl", "events.jsonl"):
        assert (finished / name).stat().st_size > 0
    manifest = json.loads((finished / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    assert (
        Settings.from_toml((finished / "job.toml").read_text()).job.model_dump(mode="json") == manifest["job"]
    )


def test_tensorboard_gets_the_metrics_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(1, run, settings_for(tmp_path, Plan(), run={"tensorboard": True}))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("loss")
    assert [(event.step, pytest.approx(event.value)) for event in scalars] == [
        (s, loss) for s, loss, _ in losses(tmp_path)
    ]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_checkpoint_after_an_evaluation_holds_the_fp32_masters(zero: int, tmp_path: Path) -> None:
    plan = Plan.model_validate({"shard": 2, "zero": zero})
    tables: dict = {
        "train": {"precision": "bf16", "eval_every": 3, "eval_samples": 8},
        "data": {"eval_fraction": 0.1},
        "checkpoint": {"every": 3, "keep": 9},
    }
    straight = tmp_path / "straight"
    run_ranks(2, run, settings_for(straight, plan, **tables))
    for checkpoint in list_checkpoints(straight / "checkpoints")[0]:
        kinds = {name: fact["dtype"] for name, fact in checkpoint.manifest["tensors"].items()}
        assert set(kinds.values()) == {"float32"}, checkpoint.path
    resumed = Path(shutil.copytree(straight, tmp_path / "resumed"))
    for later in list_checkpoints(resumed / "checkpoints")[0][1:]:
        shutil.rmtree(later.path)
    run_ranks(2, run, settings_for(resumed, plan, **tables))
    assert losses(resumed) == losses(straight)


def test_a_directory_goes_on_where_it_is_also_after_it_was_begun_anew_or_moved(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    run_ranks(1, run, settings_for(folder, Plan(), run={"resume": False}))
    moved = folder.rename(tmp_path / "moved")
    settings = load_settings(moved, [f"train.steps={STEPS + 2}"])
    assert (settings.run.dir, settings.run.resume) == (str(moved), True)
    run_ranks(1, run, settings)
    assert [step for step, _, _ in losses(moved)] == list(range(1, STEPS + 3))


def test_buffers_go_on_counting(tmp_path: Path) -> None:
    tables: dict = {
        "model": {"family": "tests.train.dropout:build"},
        "train": {"objective": "tests.train.dropout:loss", "steps": 4},
        "data": {"source": "tests.train.dropout:dataset"},
    }
    run_ranks(1, run, settings_for(tmp_path, Plan(), **tables))
    tables["train"]["steps"] = 7
    run_ranks(1, run, settings_for(tmp_path, Plan(), **tables))
    assert run_ranks(1, seen_of, tmp_path) == [7.0]


def seen_of(world: World, folder: Path) -> float:
    state = {"buffer.seen": torch.zeros(())}
    load(list_checkpoints(folder / "checkpoints")[0][-1], state, world)
    return state["buffer.seen"].item()


def run_without_drawing(world: World, settings: Settings) -> None:
    with patch("shoal.parallel.initialise.fill", side_effect=RuntimeError("weights were drawn")):
        run(world, settings)


def run_as_if_there_were_something(world: World, settings: Settings) -> None:
    with patch("shoal.train.loop.goes_on", return_value=True):
        run(world, settings)


PLANS = [Plan(), Plan(replicate=2), Plan(shard=2), Plan(tensor=2), Plan(pipeline=2, micro_batch=4)]


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_weights_that_are_loaded_are_not_drawn_first(plan: Plan, finished: Path, done: Path) -> None:
    shutil.rmtree(done / "checkpoints" / "step-00000012")
    run_ranks(plan.world_size, run_without_drawing, settings_for(done, plan))
    for mine, its in zip(losses(done), losses(finished), strict=True):
        assert mine == pytest.approx(its, rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_where_what_seemed_to_be_there_has_gone_weights_are_drawn_after_all(
    plan: Plan, finished: Path, tmp_path: Path
) -> None:
    run_ranks(plan.world_size, run_as_if_there_were_something, settings_for(tmp_path / "run", plan))
    for mine, its in zip(losses(tmp_path / "run"), losses(finished), strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


def test_a_run_that_begins_draws_its_weights(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="weights were drawn"):
        run_ranks(1, run_without_drawing, settings_for(tmp_path / "run", Plan()))
