"""A run with bad samples has the same numbers under every plan, and after it was stopped; its files say what it did without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.folder import list_checkpoints
from shoal.config import Settings
from shoal.data.bad import EVERY_EPOCH, Known
from shoal.data.prefetch import DataError
from shoal.data.sampler import sample_ids
from shoal.observe.report import write_report
from shoal.plan import Plan
from shoal.run import Run, read_json_lines
from shoal.train.bad import known_to_all, remember_events
from shoal.world import World
from tests.ranks import run_all, run_ranks
from tests.train.test_loop import STEPS, Stop, bits, losses, run, settings_for

BAD = [4, 17, 30]
MODULE = "tests.train.patchy"
PLANS = {
    "one": Plan(micro_batch=8),
    "one, small": Plan(micro_batch=2),
    "replicate": Plan(replicate=2, micro_batch=4),
    "shard": Plan(shard=2, micro_batch=1),
}


def settings(folder: Path, plan: Plan, on_error: str = "skip", workers: int = 0, **options: Any) -> Settings:
    data = {"on_error": on_error, "workers": workers, "options": {"bad": BAD} | options}
    tolerance = {} if on_error == "raise" else {"most_bad": 1.0}
    return settings_for(
        folder,
        plan.model_copy(update={"compile": False}),
        model={"family": f"{MODULE}:build"},
        data=data | tolerance | {"source": f"{MODULE}:dataset"},
        train={"objective": f"{MODULE}:loss"},
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["event"] == kind]


def eval_weight(folder: Path) -> list[int]:
    return [row["eval_weight"] for row in read_json_lines(folder / "metrics.jsonl") if "eval_weight" in row]


def samples(folder: Path) -> list[int]:
    """How many counted in each step."""
    return [row["samples"] for row in read_json_lines(folder / "metrics.jsonl") if "samples" in row]


CASES = [("skip", name, workers) for name in PLANS for workers in (0, 2)]
CASES += [("substitute", "one", 0), ("substitute", "one, small", 2), ("substitute", "shard", 0)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to the end, in folders named after policy, plan and loader processes."""
    root = tmp_path_factory.mktemp("runs")
    for size in (1, 2):
        cases = {
            (on_error, name, workers): [
                settings(root / f"{on_error} {name} {workers}", PLANS[name], on_error, workers)
            ]
            for on_error, name, workers in CASES
            if PLANS[name].world_size == size
        }
        for outcome in run_all(size, run, cases).values():
            outcome.get()
    return root


@pytest.mark.parametrize(("on_error", "name", "workers"), CASES)
def test_every_plan_and_number_of_loaders_gives_the_same_numbers(
    runs: Path, on_error: str, name: str, workers: int
) -> None:
    found, right = runs / f"{on_error} {name} {workers}", runs / f"{on_error} one 0"
    assert losses(found) == [
        pytest.approx(row, rel=1e-5) for row in losses(right)
    ]  # fp32 sums in another order
    if on_error == "skip":
        assert losses(found) == losses(runs / f"skip {name} 0")  # bit for bit
    assert samples(found) == samples(right)
    assert [event["index"] for event in events(found, "bad sample") if "split" in event]
    assert eval_weight(found) == eval_weight(right)


def test_a_skipped_sample_has_no_weight_and_a_substitute_has(runs: Path) -> None:
    ids = sample_ids(0, 0, 8 * STEPS, 40).index.reshape(STEPS, 8).tolist()
    assert samples(runs / "skip one 0") == [sum(index not in BAD for index in step) for step in ids]
    assert samples(runs / "substitute one 0") == [8] * STEPS


def test_bad_samples_are_in_the_events_the_checkpoint_and_the_report(runs: Path) -> None:
    for folder in (runs / "skip one 0", runs / "skip replicate 2"):
        told = [event for event in events(folder, "bad sample") if "split" not in event]
        assert {event["index"] for event in told} == set(BAD)
        assert all("OSError: no file" in event["error"] for event in told)
        known = list_checkpoints(folder / "checkpoints")[0][-1].manifest["bad_samples"]
        assert set(known) == {"4", "17", "30"}
        page = write_report(Run(folder)).read_text()
        assert "bad samples" in page
        assert "sample 17: OSError: no file 17.png" in page


@pytest.mark.parametrize(
    "plan", [Plan(micro_batch=2), Plan(replicate=2, micro_batch=2)], ids=["one", "replicate"]
)
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_run_that_goes_on_does_without_the_same_samples_bit_for_bit(
    tmp_path: Path, plan: Plan, on_error: str
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run_ranks(plan.world_size, run, settings(whole, plan, on_error))
    run_ranks(plan.world_size, run, settings(parted, plan, on_error), Stop(0, "forward", 4))
    run_ranks(plan.world_size, run, settings(parted, plan, on_error))
    assert len(events(parted, "start")) == 2
    assert losses(parted) == losses(whole)
    assert bits(parted) == bits(whole)


def test_steps_that_are_taken_again_do_without_samples_that_can_be_read_by_now(tmp_path: Path) -> None:
    """What came after a checkpoint is lost, and the run goes on from there; by then the storage is well."""
    plan, sign = Plan(replicate=2, micro_batch=2), tmp_path / "sign"
    ids = sample_ids(0, 0, 40, 40).index.tolist()
    told = settings(tmp_path / "run", plan, bad=[], fickle=[ids[8], ids[25], ids[38]], sign=str(sign))
    sign.touch()
    run_ranks(2, run, told, Stop(1, "forward", 1))
    run_ranks(2, run, told, Stop(1, "forward", 4))
    first = losses(tmp_path / "run")[:5]
    (list_checkpoints(tmp_path / "run" / "checkpoints")[0][-1].path / "COMMIT").unlink()
    sign.unlink()
    run_ranks(2, run, told, Stop(0, "forward", 4))
    assert [event["step"] for event in events(tmp_path / "run", "start")][-1] in (2, 3)
    assert samples(tmp_path / "run")[:5] == [8, 7, 8, 7, 7]
    assert losses(tmp_path / "run")[:5] == first


def test_one_rank_with_bad_samples_keeps_in_step_with_the_others(tmp_path: Path) -> None:
    """All of rank 1's part of the first two steps is bad: it runs fillers."""
    ids = sample_ids(0, 0, 16, 40).index.tolist()
    told = settings(tmp_path, Plan(replicate=2, micro_batch=2), bad=ids[4:8] + ids[12:16])
    run_ranks(2, run, told)
    assert samples(tmp_path)[:2] == [4, 4]
    assert {
        event["rank"]
        for event in events(tmp_path, "bad sample")
        if "split" not in event and event["step"] < 2
    } == {1}


def test_a_global_batch_without_a_good_sample_makes_no_update(tmp_path: Path) -> None:
    ids = sample_ids(0, 0, 16, 40).index.tolist()
    run_ranks(1, run, settings(tmp_path, Plan(micro_batch=4), bad=ids[8:16]))
    assert samples(tmp_path)[:3] == [8, 0, 8]
    assert [event["step"] for event in events(tmp_path, "step skipped")] == [2]


def test_with_raise_the_run_ends_with_the_sample_and_goes_on_when_it_may_be_skipped(tmp_path: Path) -> None:
    plan = Plan(micro_batch=8)
    bad = sample_ids(0, 0, 40, 40).index.tolist()[35]  # of step 4
    run_ranks(1, run, settings(tmp_path, plan, "raise", bad=[bad]), Stop(0, "forward", 1))
    with pytest.raises(
        DataError, match=rf"step 4: sample {bad} \(epoch 0\) cannot be read by rank 0: OSError: no file"
    ):
        run_ranks(1, run, settings(tmp_path, plan, "raise", bad=[bad]))
    run_ranks(1, run, settings(tmp_path, plan, "skip", bad=[bad]))
    assert samples(tmp_path)[:5] == [8, 8, 8, 8, 7]
    assert len(samples(tmp_path)) == STEPS


def gathered(world: World) -> dict[str, Any]:
    mine = [{7: 1, 3: 0}, {7: 2}, {}][world.rank]
    return known_to_all(Known(mine), world)


def test_a_checkpoint_has_what_any_rank_knows() -> None:
    assert run_ranks(3, gathered) == [{"bad_samples": {"3": 0, "7": 2}}] * 3


def test_events_are_remembered_since_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.event("bad sample", index=1, epoch=0)  # of a run that was begun anew
    run.event("start", step=0)
    run.event("bad sample", index=2, epoch=3)
    run.event("start", step=5)
    run.event("bad sample", index=3, epoch=None)
    run.event("bad sample", index=4, epoch=0, split="eval")
    known = Known()
    remember_events(known, run)
    assert known == {2: 3, 3: EVERY_EPOCH}
