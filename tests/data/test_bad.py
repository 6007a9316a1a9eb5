"""Bad samples: every plan does without the same ones, each is told once, and too many end the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from shoal.data.bad import EVERY_EPOCH, BadSamples, Known
from shoal.data.batches import DataError, batches, eval_batches, numbers_of
from shoal.data.sampler import sample_ids, substitute
from shoal.data.tokens import TokenDataset
from shoal.job import Data, Job, Train
from shoal.plan import Plan
from tests.data.sources import Moody, Numbers, Patchy, Place, Stream, write_tokens
from tests.data.test_batches import flat, global_batches
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def job(on_error: str, workers: int = 0, steps: int = 6, **data: Any) -> Job:
    told = Data(workers=workers, on_error=on_error, **{"most_bad": 1.0, **data})  # pyrefly: ignore[bad-argument-type]
    return Job(data=told, train=Train(global_batch=4, steps=steps, seed=3))


class Told(BadSamples):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(lambda kind, details: self.events.append((kind, details)))
        self.events: list[tuple[str, dict[str, Any]]] = []


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("dataset", [Patchy(9), Moody(9)], ids=["always", "in some epochs"])
def test_every_world_and_number_of_loaders_does_without_the_same_samples(dataset: Any, on_error: str) -> None:
    whole = global_batches(dataset, job(on_error), 1)
    for size, workers in [(2, 0), (4, 0), (1, 2), (2, 1)]:
        assert global_batches(dataset, job(on_error, workers), size) == whole


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_micro_batch_knows_the_samples_that_it_was_read_from(on_error: str, workers: int) -> None:
    asked, alone = job(on_error, workers), SimpleNamespace(rank=0, size=1)
    numbers = numbers_of(Patchy(9), asked)
    for batch in batches(Patchy(9), asked, Plan(micro_batch=2), alone, stop=3):
        for micro in batch.micro_batches:
            assert numbers(micro) == micro.data[0].tolist()


def test_a_skipped_sample_is_left_out_of_its_global_batch_and_no_other_comes_for_it() -> None:
    ids = sample_ids(3, 0, 24, 9).index.reshape(6, 4).tolist()
    read = global_batches(Patchy(9), job("skip"), 2)
    assert [[sample[0] for sample in step] for step in read] == [
        [index for index in step if index not in (3, 5)] for step in ids
    ]


def test_a_substitute_depends_on_the_seed_and_the_sample_alone_and_is_itself_good() -> None:
    ids = sample_ids(3, 0, 24, 9).index.tolist()

    def stands_for(index: int) -> int:
        tries = (substitute(3, index, attempt, 9) for attempt in range(1, 65))
        return next(other for other in tries if other not in (3, 5))

    read = [sample[0] for sample in flat(global_batches(Patchy(9), job("substitute"), 1))]
    assert read == [stands_for(index) if index in (3, 5) else index for index in ids]


def test_a_sample_that_fails_in_one_epoch_is_read_again_in_the_next() -> None:
    steps = global_batches(Moody(4), job("skip", steps=40), 1)
    assert 100 < len(flat(steps)) < 160 * 0.95
    assert {sample[0] for sample in flat(steps)} == {0, 1, 2, 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_told_once_with_its_place_and_the_users_line(workers: int) -> None:
    bad = Told()
    found = list(
        batches(Patchy(8), job("skip", workers, shuffle=False), Plan(micro_batch=1), Place(0, 1), bad=bad)
    )
    assert [[micro.samples for micro in batch.micro_batches] for batch in found] == [
        [1, 1, 1, 0],
        [1, 0, 1, 1],
    ] * 3
    assert [(kind, told["index"], told["step"]) for kind, told in bad.events] == [
        ("bad sample", 3, 0),
        ("bad sample", 5, 1),
    ]
    first = bad.events[0][1]
    assert first["rank"] == first["epoch"] == 0
    assert first["error"].startswith("OSError: no file 3.png, at ")
    assert "sources.py:" in first["error"]
    assert dict(bad.known) == {3: 2, 5: 2}


def test_a_sample_that_is_known_to_be_bad_is_not_read() -> None:
    bad, dataset = Told(), Patchy(8)
    bad.known.update({3: EVERY_EPOCH, 5: 0})
    list(batches(dataset, job("skip", shuffle=False), Plan(micro_batch=2), Place(0, 1), bad=bad))
    assert 3 not in dataset.read
    assert dataset.read.count(5) == 2  # in the second and the third epoch
    assert bad.events == []


def test_a_micro_batch_without_a_good_sample_is_a_filler_that_has_one() -> None:
    steps = batches(Patchy(8, (0, 1)), job("skip", shuffle=False), Plan(micro_batch=2), Place(0, 1))
    first, second = next(steps).micro_batches
    assert (first.samples, second.samples) == (0, 2)
    assert first.data[0].shape == (2,)
    assert not {0, 1} & set(first.data[0].tolist())


def test_evaluation_leaves_bad_samples_out_too() -> None:
    bad = Told()
    for _ in range(2):
        read = global_batches(Patchy(11), job("skip"), 2, eval_batches, bad=bad)  # pyrefly: ignore[bad-argument-type]
        assert [sample[0] for sample in flat(read)] == [0, 1, 2, 4, 6, 7, 8, 9, 10]
    assert sorted(told["index"] for _, told in bad.events) == [3, 5]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_too_many_bad_samples_end_the_run(on_error: str, workers: int) -> None:
    told = job(on_error, workers, steps=100, most_bad=0.1)
    message = (
        r"step \d+: \d+ of the \d+ samples that this rank has read are bad, more than data.most_bad = 0.1"
    )
    with pytest.raises(DataError, match=message):
        list(batches(Patchy(8, (1, 2, 3)), told, Plan(micro_batch=2), Place(0, 1)))
    assert len(list(batches(Patchy(100, (1, 2, 3)), told, Plan(micro_batch=2), Place(0, 1)))) == 100


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_dataset_without_a_good_sample_ends_the_run(on_error: str) -> None:
    with pytest.raises(DataError, match=r"64 samples that could stand in for sample 0 \(epoch 0\) are bad"):
        list(batches(Patchy(4, (0, 1, 2, 3)), job(on_error, shuffle=False), Plan(), Place(0, 1)))


class Shapes(Numbers):
    """Sample 2 is no tensor, and sample 7 is one of another shape."""

    def __getitem__(self, index: int) -> Any:
        return None if index == 2 else torch.zeros(3 if index == 7 else 2)


def test_a_sample_that_cannot_be_collated_even_alone_is_bad_and_one_that_does_not_fit_is_an_error() -> None:
    bad = Told()
    steps = batches(Shapes(8), job("skip", shuffle=False), Plan(micro_batch=4), Place(0, 1), bad=bad)
    assert next(steps).micro_batches[0].data.shape == (3, 2)
    assert [told["index"] for _, told in bad.events] == [2]
    with pytest.raises(
        DataError, match=r"step 1: rank 0: samples 4, 5, 6, 7 \(epoch 0\) cannot be made a .*default_coll"
    ):
        next(steps)


class Whole(Numbers):
    """Its collate function wants two samples or more."""

    def collate_fn(self, samples: list[int]) -> Any:
        if len(samples) < 2:
            raise ValueError("give me more")
        return default_collate([*samples, []] if 5 in samples else samples)


def test_a_collate_function_that_fails_for_all_accuses_no_sample() -> None:
    steps = batches(Whole(8), job("skip", shuffle=False), Plan(micro_batch=4), Place(0, 1))
    assert next(steps).micro_batches[0].samples == 4
    with pytest.raises(
        DataError, match=r"samples 4, 5, 6, 7 \(epoch 0\) cannot be made a micro-batch by Whole.collate_fn"
    ):
        next(steps)


def test_with_raise_the_error_has_the_datasets_traceback() -> None:
    told = Job(data=Data(workers=2, shuffle=False), train=Train(global_batch=4, steps=2))
    with pytest.raises(DataError) as caught:
        list(batches(Patchy(8), told, Plan(), Place(0, 1)))
    assert caught.value.__cause__ is not None
    assert 'raise OSError(f"no file {index}.png")' in caught.value.__cause__.__notes__[0]


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[1, 2, 3, 256]])
    text = TokenDataset(tmp_path, "train", 2)
    for dataset, what in [(Stream(5), "a stream"), (text, "of text")]:
        with pytest.raises(
            ValueError, match=f'data.on_error = "skip" is for datasets of your own .* this one is {what}'
        ):
            batches(dataset, job("skip"), Plan(), Place(0, 1))
    with pytest.raises(ValueError, match='"substitute" keeps their size'):
        batches(Numbers(5), job("skip"), Plan(pipeline=2), Place(0, 2))
    with pytest.raises(ValueError, match=r"most_bad = 0.5 is for on_error"):
        Data(most_bad=0.5)
    with pytest.raises(ValueError, match=r"deadline_s = 5 is for loader processes, and workers = 0 has none"):
        Data(deadline_s=5.0, workers=0)
    with pytest.raises(ValueError, match=r"data.deadline_s = 700 is not less than run.deadline_s = 600"):
        batches(Numbers(5), job("skip", 1, deadline_s=700.0), Plan(), Place(0, 1))


def test_the_newest_epoch_counts_and_every_epoch_stays() -> None:
    known = Known()
    for epoch, index in [(2, 7), (1, 7), (EVERY_EPOCH, 8), (3, 8)]:
        known.note(epoch, index)
    assert known == {7: 2, 8: EVERY_EPOCH}
    assert known.covers(2, 7) and known.covers(9, 8) and not known.covers(1, 7) and not known.covers(0, 1)


def read_together(world: Any, on_error: str) -> list[Any]:
    """Two ranks that share each sample; rank 1 alone cannot read some of them."""
    dataset = Patchy(9, (2, 3, 5) if world.rank else (2,))
    found = batches(dataset, job(on_error), Plan(tensor=2, micro_batch=2), world, deadline_s=30)
    return [
        [micro.samples, [part.tolist() for part in micro.data]]
        for batch in found
        for micro in batch.micro_batches
    ]


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_ranks_that_share_samples_do_without_what_any_of_them_cannot_read(on_error: str) -> None:
    first, second = run_ranks(2, read_together, on_error, timeout=60)
    assert first == second
    alone = batches(Patchy(9, (2, 3, 5)), job(on_error), Plan(micro_batch=2), Place(0, 1))
    assert first == [
        [micro.samples, [part.tolist() for part in micro.data]]
        for batch in alone
        for micro in batch.micro_batches
    ]
