"""A run that is stopped anywhere and goes on has the same bits as one that was never stopped."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.config import Settings, parse
from shoal.observe.status import RankStatus
from shoal.plan import Plan
from shoal.run import Run, read_json_lines
from shoal.train.loop import train
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks

STEPS = 12


class Flag:
    """A stop flag that a step number or a signal sets."""

    def __init__(self) -> None:
        self.requested = False

    def on_signal(self, number: int, frame: object) -> None:
        self.requested = True


class StopAt(RankStatus):
    """Asks one rank to stop when it enters a step, or when it enters a phase."""

    def __init__(self, rank: int, flag: Flag, phase: str, step: int) -> None:
        super().__init__(None, rank)
        self._when, self._flag = (phase, step), flag

    def enter(self, phase: str, step: int) -> None:
        super().enter(phase, step)
        if (phase, step) == self._when:
            self._flag.requested = True


class Stop(NamedTuple):
    rank: int
    phase: str
    step: int


def settings_for(folder: Path, plan: Plan, **tables: Any) -> Settings:
    base = {
        "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 48, "tied": True},
        "data": {"source": "synthetic", "vocab": 300, "seq_len": 16, "eval_fraction": 0.0},
        "train": {"steps": STEPS, "global_batch": 8},
        "optimizer": {"lr": 1e-2, "warmup": 2},
        "run": {"dir": str(folder), "log_every": 1000},
    }
    for name, table in tables.items():
        own_model = name == "model" and "family" in table
        base[name] = table if own_model else {**base.get(name, {}), **table}
    return parse(base, "test").with_plan(plan)


def run(world: World, settings: Settings, stop: Stop | None = None) -> None:
    flag = Flag()
    status = RankStatus(None, world.rank)
    if stop is not None and stop.rank == world.rank:
        status = StopAt(world.rank, flag, stop.phase, stop.step)
    if world.is_main:
        Run(Path(settings.run.dir)).create()
    world.barrier("the directory is there")
    train(settings, world, status, flag)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of every step, in order."""
    return [
        (r["step"], r["loss"], r["grad_norm"])
        for r in read_json_lines(folder / "metrics.jsonl")
        if "loss" in r
    ]


def bits(folder: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint."""
    checkpoint = list_checkpoints(folder / "checkpoints")[0][-1]
    assert checkpoint.step == STEPS
    return {name: tensor.numpy().tobytes() for name, tensor in whole_tensors(checkpoint)}


PLANS = {
    "one device": Plan(),
    "replicate": Plan(replicate=2, micro_batch=2),
    "zero3": Plan(shard=2, zero=3, micro_batch=2),
}


@pytest.fixture(scope="module", params=list(PLANS.values()), ids=list(PLANS))
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Plan, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(request.param.world_size, run, settings_for(folder, request.param))
    return request.param, folder


@pytest.mark.parametrize("step", [0, 4, STEPS - 2])
def test_resuming_after_a_stop_gives_the_same_bits(
    undisturbed: tuple[Plan, Path], step: int, tmp_path: Path
) -> None:
    plan, reference = undisturbed
    settings = settings_for(tmp_path, plan)
    victim = step % plan.world_size
    run_ranks(plan.world_size, run, settings, Stop(victim, "forward", step))
    stopped_at = list_checkpoints(tmp_path / "checkpoints")[0][-1].step
    assert step + 1 <= stopped_at <= step + 2
    run_ranks(plan.world_size, run, settings)
    assert losses(tmp_path) == losses(reference)
    assert bits(tmp_path) == bits(reference)


@pytest.mark.parametrize("first", [0, 1])
def test_so_does_a_run_that_is_stopped_again_and_again(
    undisturbed: tuple[Plan, Path], first: int, tmp_path: Path
) -> None:
    """Each time in fresh processes, in their first step. They may do one more: what begins with 0 and with 1 stops after each."""
    plan, reference = undisturbed
    settings = settings_for(tmp_path, plan)
    done, right = first, losses(reference)
    while done < STEPS:
        run_ranks(plan.world_size, run, settings, Stop(done % plan.world_size, "forward", done))
        stopped_at = list_checkpoints(tmp_path / "checkpoints")[0][-1].step
        assert done + 1 <= stopped_at <= done + 2
        assert losses(tmp_path) == right[:stopped_at]
        done = stopped_at
    assert bits(tmp_path) == bits(reference)


def run_until_signal(world: World, settings: Settings, victim: int, after_s: float) -> None:
    flag = Flag()
    signal.signal(signal.SIGTERM, flag.on_signal)
    if world.is_main:
        Run(Path(settings.run.dir)).create()
    world.barrier("the directory is there")
    if world.rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
    train(settings, world, RankStatus(None, world.rank), flag)


@pytest.mark.parametrize("trial", range(3))  # of each of three plans; every step is stopped at above
def test_sigterm_at_a_random_time_saves_and_the_rest_has_the_same_bits(
    undisturbed: tuple[Plan, Path], trial: int, tmp_path: Path
) -> None:
    plan, reference = undisturbed
    draw = random.Random(f"{plan} {trial}")
    settings = settings_for(tmp_path, plan)
    run_ranks(
        plan.world_size, run_until_signal, settings, draw.randrange(plan.world_size), draw.uniform(0.0, 0.3)
    )
    good, refused = list_checkpoints(tmp_path / "checkpoints")
    assert good and not refused
    run_ranks(plan.world_size, run, settings)
    assert losses(tmp_path) == losses(reference)
    assert bits(tmp_path) == bits(reference)


def test_a_run_goes_on_under_another_plan_with_the_same_samples(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    run_ranks(1, run, settings_for(reference, Plan()))
    moved = tmp_path / "moved"
    run_ranks(4, run, settings_for(moved, Plan(replicate=2, shard=2, zero=2)), Stop(3, "forward", 3))
    run_ranks(2, run, settings_for(moved, Plan(shard=2, zero=3)), Stop(0, "forward", 7))
    run_ranks(1, run, settings_for(moved, Plan()))
    for ours, theirs in zip(losses(moved), losses(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)  # fp32, 12 steps of AdamW at a high rate


def test_dropout_is_the_same_for_every_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    tables = {
        "model": {"family": "tests.train.dropout:build"},
        "train": {"objective": "tests.train.dropout:loss"},
        "data": {"source": "tests.train.dropout:dataset"},
    }

    def settings(name: str, plan: Plan) -> Settings:
        return settings_for(tmp_path / name, plan, **tables)

    run_ranks(1, run, settings("one", Plan(micro_batch=2)))
    run_ranks(4, run, settings("four", Plan(replicate=2, shard=2, micro_batch=2)))
    run_ranks(2, run, settings("stopped", Plan(replicate=2, micro_batch=2)), Stop(1, "forward", 5))
    run_ranks(2, run, settings("stopped", Plan(replicate=2, micro_batch=2)))
    for name in ("four", "stopped"):
        for ours, theirs in zip(losses(tmp_path / name), losses(tmp_path / "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def asked(world: World, folder: str) -> list[bool]:
    """Which steps of a run are told that another one follows at once."""
    found: list[bool] = []
    take = Step.__call__

    def noted(self: Step, *words: Any, ahead: bool = False, **more: Any) -> Any:
        found.append(ahead)
        return take(self, *words, ahead=ahead, **more)

    settings = settings_for(Path(folder), Plan(micro_batch=8), train={"steps": 7}, checkpoint={"every": 3})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Step, "__call__", noted)
        run(world, settings)
    return found


def test_a_step_is_told_that_another_follows_unless_something_comes_between(tmp_path: Path) -> None:
    assert run_ranks(1, asked, str(tmp_path)) == [[True, True, False, True, True, False, False]]
