"""A loss spike: the run goes back and skips its data, with the numbers of a run that never had it, however it is stopped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.plain import whole_tensors
from shoal.config import ConfigError, Settings, parse
from shoal.job import Train
from shoal.launch.local import Outcome, launch
from shoal.launch.ready import check_spikes
from shoal.plan import Plan
from shoal.run import read_json_lines
from shoal.train.spikes import MOST, Spike, SpikeError, Spikes, spans
from tests.ranks import run_ranks
from tests.train.test_loop import Stop, run

STEPS, BATCH = 12, 8
BAD, REWIND = 7, 2  # the step whose data is bad, from 0; so that the data of steps 5 to 7 is skipped
MINE = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

def dataset(without, bad):
    x = torch.randn(20 * 8, 4, generator=torch.Generator().manual_seed(0))
    y = x.sin()
    for step in bad:
        y[step * 8 : step * 8 + 8] += 100.0
    kept = torch.ones(len(x), dtype=torch.bool)
    for step in without:
        kept[step * 8 : step * 8 + 8] = False
    x, y = x[kept], y[kept]
    return torch.utils.data.TensorDataset(x, y)

def loss(output, target):
    return torch.nn.functional.mse_loss(output, target.to(output.dtype))
"""


def settings_for(
    folder: Path,
    plan: Plan,
    name: str,
    *,
    without: list[int] | None = None,
    bad: list[int] | None = None,
    **tables: Any,
) -> Settings:
    mine = folder / "mine.py"
    mine.write_text(MINE)
    spike = {} if without else {"spike": 20.0, "spike_window": 4, "spike_rewind": REWIND}
    train = {"steps": STEPS, "global_batch": BATCH, "objective": f"{mine}:loss", "precision": "fp64"}
    table = {
        "model": {"family": f"{mine}:build"},
        "data": {
            "source": f"{mine}:dataset",
            "shuffle": False,
            "options": {"without": without or [], "bad": bad or [BAD]},
        },
        "train": train | spike,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 3},
        "run": {"dir": str(folder / name), "log_every": 1000},
    }
    return parse(
        {**table, **{key: {**table[key], **more} for key, more in tables.items()}}, "test"
    ).with_plan(plan)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [
        (line["step"], line["loss"], line["grad_norm"]) for line in read_json_lines(folder / "metrics.jsonl")
    ]


def rewinds(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["event"] == "rewind"]


def bits(folder: Path) -> dict[str, bytes]:
    last = list_checkpoints(folder / "checkpoints")[0][-1]
    assert last.step == STEPS
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in whole_tensors(last)
        if not name.startswith("spikes.")
    }


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never had the data of steps 5 to 7, and looks for no spikes."""
    folder = tmp_path_factory.mktemp("right")
    run_ranks(1, run, settings_for(folder, Plan(), "run", without=[5, 6, 7]))
    return folder / "run"


@pytest.mark.parametrize("stops", [[], [3], [BAD, 9], [BAD - 1, BAD + 1]], ids=str)
@pytest.mark.parametrize("every", [3, 2])
def test_numbers_are_those_of_a_run_without_that_data_wherever_it_is_stopped_and_saved(
    stops: list[int], every: int, right: Path, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, Plan(), "run", checkpoint={"every": every})
    for step in stops:
        run_ranks(1, run, settings, Stop(0, "data", step))
    run_ranks(1, run, settings)
    folder = tmp_path / "run"
    assert losses(folder) == losses(right)
    assert bits(folder) == bits(right)
    found = rewinds(folder)
    assert {(event["step"], event["skipped_from"], event["skipped"]) for event in found} == {(8, 6, 3)}
    assert all(event["to"] <= BAD - REWIND for event in found)
    last = list_checkpoints(folder / "checkpoints")[0][-1]
    assert last.manifest["skipped_data"] == [[BAD - REWIND, REWIND + 1]]


@pytest.mark.parametrize(
    "plan", [Plan(replicate=2, micro_batch=2), Plan(shard=2, micro_batch=4)], ids=["copies", "ZeRO-3"]
)
def test_every_plan_sees_the_same_spike_and_skips_the_same(plan: Plan, right: Path, tmp_path: Path) -> None:
    run_ranks(2, run, settings_for(tmp_path, plan, "run"))
    for ours, theirs in zip(losses(tmp_path / "run"), losses(right), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)  # fp64 sums in another order
    (event,) = rewinds(tmp_path / "run")
    assert (event["step"], event["to"]) == (8, 3)


@pytest.mark.parametrize("stops", [[], [6, 8, 10]], ids=str)
def test_checkpoints_of_before_an_earlier_rewind_are_not_gone_back_to(
    stops: list[int], tmp_path: Path
) -> None:
    """The second spike is in step 9, and back to step 7 there is a checkpoint that has seen the data that is now skipped."""
    run_ranks(1, run, settings_for(tmp_path, Plan(), "right", without=[5, 6, 7, 10, 11, 12], bad=[7, 12]))
    settings = settings_for(tmp_path, Plan(), "run", bad=[7, 12])
    for step in stops:
        run_ranks(1, run, settings, Stop(0, "data", step))
    run_ranks(1, run, settings)
    assert losses(tmp_path / "run") == losses(tmp_path / "right")
    assert bits(tmp_path / "run") == bits(tmp_path / "right")
    assert [(event["step"], event["skipped_from"]) for event in rewinds(tmp_path / "run")] == [
        (8, 6),
        (10, 8),
    ]


def test_checkpoints_of_the_way_that_was_left_are_gone(right: Path, tmp_path: Path) -> None:
    """Else a run that is stopped soon after going back would go on from one of them, and meet the spike again."""
    settings = settings_for(tmp_path, Plan(), "run")
    run_ranks(1, run, settings, Stop(0, "load", BAD - REWIND))
    there = [found.step for found in list_checkpoints(tmp_path / "run" / "checkpoints")[0]]
    assert there[-1] == 4 and 6 not in there
    run_ranks(1, run, settings)
    assert losses(tmp_path / "run") == losses(right)
    assert len(rewinds(tmp_path / "run")) == 1


@pytest.mark.usefixtures("warm_nursery")
def test_state_in_memory_is_of_the_time_after_a_run_went_back(right: Path, tmp_path: Path) -> None:
    policy = {"every": 3, "memory_every": 1}
    faults = "kill rank=0 step=7 phase=reduce; kill rank=0 step=9"
    settings = settings_for(
        tmp_path, Plan(), "run", checkpoint=policy, run={"faults": faults, "deadline_s": 60.0}
    )
    assert launch(settings, 1, device="cpu", quiet=True) == Outcome("ok", STEPS)
    assert losses(tmp_path / "run") == losses(right)
    assert bits(tmp_path / "run") == bits(right)
    starts = [
        event["step"]
        for event in read_json_lines(tmp_path / "run" / "events.jsonl")
        if event["event"] == "start"
    ]
    assert starts == [0, 7, 9]
    assert len(rewinds(tmp_path / "run")) == 1


def test_a_run_goes_on_with_another_number_of_ranks_after_it_went_back(right: Path, tmp_path: Path) -> None:
    run_ranks(1, run, settings_for(tmp_path, Plan(), "run"), Stop(0, "data", 9))
    run_ranks(2, run, settings_for(tmp_path, Plan(shard=2), "run"))
    for ours, theirs in zip(losses(tmp_path / "run"), losses(right), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def fed(spikes: Spikes, losses: list[float], first: int = 0) -> Spike | None:
    for step, loss in enumerate(losses, start=first):
        try:
            spikes.take(step, loss)
        except SpikeError as found:
            return found.spike
    return None


def make(**keys: Any) -> Spikes:
    return Spikes(Train.model_validate({"spike": 6.0, "spike_window": 4, "spike_rewind": 2} | keys))


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([5.0, 4.9, 4.8, 4.7, 4.6, 9.0], 5),
        ([5.0, 4.9, 4.8, 9.0, 4.6, 4.5], None),  # too few before it
        ([5.0, 4.9, 4.8, 4.7, 4.6, 0.1], None),  # down is fine
        ([1.0, 1.0, 1.0, 1.0, 1.0005], None),  # the noise of a flat course
        ([1.0, 1.0, 1.0, 1.0, 1.1], 4),
        ([5.0, 4.9, 4.8, 4.7, math.nan, 4.6, math.inf, 9.0], 7),  # skipped steps are another matter
    ],
)
def test_a_spike_is_told_from_the_losses_before_it(losses: list[float], step: int | None) -> None:
    found = fed(make(), losses)
    assert (found and found.step) == step
    if found is not None:
        assert (found.begin, found.length) == (found.step - 2, 3)


def test_after_going_back_nothing_is_judged_until_past_the_spike() -> None:
    spikes = make()
    spike = fed(spikes, [5.0, 4.9, 4.8, 4.7, 4.6, 9.0])
    assert spike is not None
    spikes.skip(spike, spikes.skips)
    assert fed(spikes, [9.0], first=5) is None
    assert fed(spikes, [99.0], first=6) is not None


def test_spikes_without_an_end_end_a_run() -> None:
    spikes, spike = make(), Spike(9, 5.0, 9.0, 7)
    spikes.skip(spike, [(0, 1)] * (MOST - 1))
    with pytest.raises(FloatingPointError, match="the 17th: this is no matter of data"):
        spikes.skip(spike, [(0, 1)] * MOST)


def test_data_after_several_windows_is_as_much_further() -> None:
    skips = [(4, 2), (6, 3), (6, 1)]
    found = [
        step - span.step + span.data
        for span in spans(skips, 2, 9)
        for step in range(span.step, span.step + span.count)
    ]
    assert found == [2, 3, 6, 7, 12, 13, 14]
    assert [span.data for span in spans(skips, 7, 9)] == [13]


def test_with_nothing_to_go_back_to_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.every = 0 writes none; use such as checkpoint.every=2"):
        check_spikes(settings_for(tmp_path, Plan(), "run", checkpoint={"every": 0}))


def test_settings_of_what_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="spike_rewind = 5 is for spikes, and spike = 0 sees none"):
        parse({"train": {"spike_rewind": 5}}, "test")
