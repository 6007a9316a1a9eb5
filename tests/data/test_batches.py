"""Batches: the same samples in the same global batches, whatever the world, the workers or the start."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.batches import DataError, batches, eval_batches, open_dataset
from shoal.data.prepare import prepare
from shoal.data.tokens import NO_LABEL, TokenDataset
from shoal.data.user import loaders_for
from shoal.job import Data, Job, Train
from shoal.plan import Plan
from tests.data.sources import (
    Augmented,
    Broken,
    Numbers,
    Pairs,
    Place,
    Stream,
    ids,
    write_tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
WORLDS = {
    1: Plan(micro_batch=2),
    2: Plan(shard=2, micro_batch=2),
    4: Plan(replicate=2, shard=2, micro_batch=1),
}


def job(workers: int = 0, steps: int = 6, **data: Any) -> Job:
    return Job(
        data=Data(workers=workers, seq_len=8, **data), train=Train(global_batch=4, steps=steps, seed=3)
    )


def global_batches(
    dataset: Any, job: Job, size: int, read: Callable[..., Any] = batches, **span: int
) -> list[list[Any]]:
    """The samples of each step that count, in the order of their place in the global batch, over all ranks."""
    ranks = [list(read(dataset, job, WORLDS[size], Place(rank, size), **span)) for rank in range(size)]
    assert len({len(rank) for rank in ranks}) == 1
    steps = []
    for step in zip(*ranks, strict=True):
        assert len({batch.step for batch in step}) == len({len(batch.micro_batches) for batch in step}) == 1
        found = [micro for batch in step for micro in batch.micro_batches if micro.samples]
        micros = sorted(found, key=lambda micro: micro.first)
        steps.append([sample for micro in micros for sample in samples_of(micro.data)])
    return steps


def flat(steps: list[list[Any]]) -> list[Any]:
    return [sample for step in steps for sample in step]


def samples_of(data: Any) -> list[Any]:
    return (
        list(zip(*(part.tolist() for part in data), strict=True)) if isinstance(data, list) else data.tolist()
    )


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_epoch_reads_every_sample_once_over_all_ranks_and_workers(size: int, workers: int) -> None:
    read = global_batches(Numbers(12), job(workers), size)
    assert sorted(flat(read[:3])) == sorted(flat(read[3:])) == list(range(12))
    assert read == global_batches(Numbers(12), job(0), 1)
    assert read[:3] != read[3:]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stream_is_read_once_in_its_order_over_all_ranks_and_workers(size: int, workers: int) -> None:
    read = global_batches(Stream(14), job(workers), size)
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]


@pytest.mark.parametrize(
    "dataset", [Numbers(9), Augmented(9), Stream(22)], ids=["map", "augmented", "stream"]
)
def test_a_resumed_run_reads_what_the_uninterrupted_one_would_have(dataset: Any) -> None:
    whole = global_batches(dataset, job(0), 1)
    for stop, before, after, workers in [(1, 2, 1, 0), (3, 4, 2, 1), (5, 1, 4, 0)]:
        first = global_batches(dataset, job(workers), before, stop=stop)
        assert first + global_batches(dataset, job(workers), after, start=stop) == whole


def test_augmentation_depends_on_the_sample_and_the_epoch_alone() -> None:
    whole = global_batches(Augmented(4), job(), 1)
    assert whole == global_batches(Augmented(4), job(workers=2), 2)
    assert sorted(whole[0]) != sorted(whole[1])  # the next epoch: the same samples, other random numbers
    assert [sample[0] for sample in sorted(whole[0])] == [sample[0] for sample in sorted(whole[1])]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Augmented(9), Stream(22)], ids=["map", "stream"])
def test_reading_leaves_the_trainers_random_numbers_alone(dataset: Any, workers: int) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    list(batches(dataset, job(workers), WORLDS[1], Place(0, 1)))
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_a_dataset_smaller_than_the_global_batch_is_read_again() -> None:
    read = flat(global_batches(Numbers(3), job(), 2))
    assert all(sorted(read[at : at + 3]) == [0, 1, 2] for at in range(0, 24, 3))


def test_first_is_the_place_in_the_run() -> None:
    found = list(batches(Numbers(50), job(shuffle=False), WORLDS[2], Place(1, 2), start=2, stop=3))
    assert [(micro.first, micro.samples, micro.data.tolist()) for micro in found[0].micro_batches] == [
        (10, 2, [10, 11])
    ]


def test_a_collate_function_of_the_datasets_own_is_used() -> None:
    found = next(batches(Pairs(5), job(shuffle=False), WORLDS[1], Place(0, 1)))
    assert found.micro_batches[1].data == [("sample", 2), ("sample", 3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    steps = batches(Broken(8), job(workers, shuffle=False), WORLDS[1], Place(0, 1))
    assert ids(next(steps)) == [0, 1, 2, 3]
    with pytest.raises(DataError) as caught:
        next(steps)
    who = "loader process 0 of rank 0" if workers else "rank 0"
    assert str(caught.value).startswith(
        f"step 1: sample 5 (epoch 0) cannot be read by {who}: OSError: the disk is gone, at "
    )
    assert "sources.py:" in str(caught.value)
    assert 'in __getitem__: raise OSError("the disk is gone")' in str(caught.value)


def test_what_is_no_dataset_or_empty_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="int is no dataset"):
        batches(5, job(), WORLDS[1], Place(0, 1))
    with pytest.raises(ValueError, match=r"the dataset \(Numbers\) is empty"):
        batches(Numbers(0), job(), WORLDS[1], Place(0, 1))


@pytest.mark.parametrize("dataset", [Numbers(11), Stream(11)], ids=["map", "stream"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("limit", [None, 1, 6, 100])
def test_evaluation_counts_each_held_out_sample_once(dataset: Any, size: int, limit: int | None) -> None:
    held = job().model_copy(update={"train": Train(global_batch=4, eval_samples=limit)})
    read = flat(global_batches(dataset, held, size, eval_batches))
    assert read == list(range(min(11, limit or 11)))


def test_the_cost_of_a_stream_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        global_batches(Stream(4), job(workers=2), 2)
    assert len(caplog.records) == 1
    assert "4 times the reading of one" in caplog.records[0].getMessage()


def write_documents(folder: Path) -> list[int]:
    documents = [[number, *range(number), 256] for number in range(1, 12)]
    write_tokens(folder, documents, documents[:5], shard_tokens=20)
    return [token for document in documents for token in document]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_epoch_of_text_has_every_token_once_as_a_label(tmp_path: Path, size: int) -> None:
    text = write_documents(tmp_path)
    dataset = TokenDataset(tmp_path, "train", 8)
    steps = len(dataset) // 4  # 11 windows: 3 global batches go one sample into the next epoch
    assert len(dataset) == 11
    labels: list[int] = []
    for rank in range(size):
        for batch in batches(dataset, job(), WORLDS[size], Place(rank, size), stop=steps + 1):
            for micro in batch.micro_batches:
                rows = min(micro.samples, max(0, 11 - micro.first))
                labels += [
                    label for label in micro.data["labels"][:rows].flatten().tolist() if label != NO_LABEL
                ]
    assert sorted(labels) == sorted(text[1:])


def test_text_keeps_its_shape_and_fillers_have_no_labels(tmp_path: Path) -> None:
    write_documents(tmp_path)
    held_out = TokenDataset(tmp_path, "eval", 8)
    text = [token for number in range(1, 6) for token in [number, *range(number), 256]]
    labels: list[int] = []
    for rank in range(2):
        for batch in eval_batches(held_out, job(), WORLDS[2], Place(rank, 2)):
            for micro in batch.micro_batches:
                assert micro.data["tokens"].shape == micro.data["labels"].shape == (2, 8)
                assert (micro.data["labels"][micro.samples :] == NO_LABEL).all()
                labels += [label for label in micro.data["labels"].flatten().tolist() if label != NO_LABEL]
    assert sorted(labels) == sorted(text[1:])


def test_a_window_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path)
    dataset = TokenDataset(tmp_path, "train", 8)
    monkeypatch.setattr(TokenDataset, "fetch", lambda self, index: index[99])
    steps = batches(dataset, job(shuffle=False), WORLDS[1], Place(0, 1))
    with pytest.raises(DataError, match="step 0: reading samples 0, 1 failed: IndexError"):
        next(steps)


def test_a_job_of_text_is_opened_with_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("some other text")
    data = Data(source=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tokenizer="bytes", seq_len=4)
    prepare(data, 0, tmp_path / "out")
    found = open_dataset(data, 0, tmp_path / "out")
    assert (found.vocab, found.tokenizer) == (257, tmp_path / "out" / "tokenizer.json")
    assert found.eval is not None
    again = open_dataset(Data(source=str(tmp_path / "out")), 5, None)
    assert (again.vocab, again.train.seq_len) == (257, 256)
    with pytest.raises(ValueError, match="tokenizer 'bytes', now 'bpe'; seed 0, now 1"):
        open_dataset(data.model_copy(update={"tokenizer": "bpe"}), 1, tmp_path / "out")
    with pytest.raises(ValueError, match="is text: prepare it, and give the folder"):
        open_dataset(data, 0, None)


def test_synthetic_and_own_datasets_need_no_folder() -> None:
    found = open_dataset(Data(source="synthetic", vocab=300, seq_len=8), 0, None)
    assert (found.vocab, found.tokenizer, len(found.eval or [])) == (300, None, 64)
    assert open_dataset(Data(source="synthetic", eval_fraction=0.0), 0, None).eval is None
    own = open_dataset(Data(source="tests.data.sources:train_and_eval", options={"n": 7}), 0, None)
    assert (len(own.train), type(own.eval), own.vocab) == (7, Stream, None)
    batch = next(batches(found.train, job(), WORLDS[2], Place(0, 2)))
    assert batch.micro_batches[0].data["tokens"].shape == (2, 8)


@pytest.mark.parametrize(("cores", "devices", "loaders"), [(64, 4, 4), (12, 4, 2), (4, 4, 0), (1, 4, 0)])
def test_a_rank_on_a_gpu_has_as_many_loaders_as_its_share_of_the_cores_leaves(
    monkeypatch: pytest.MonkeyPatch, cores: int, devices: int, loaders: int
) -> None:
    monkeypatch.setattr("shoal.data.user.cores", lambda: float(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert loaders_for(None, torch.device("cuda", 1)) == loaders
    assert loaders_for(1, torch.device("cuda", 1)) == 1
    assert loaders_for(None, torch.device("cpu")) == 0
