"""Streams: an order that every reader agrees on, and one last step for all ranks."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch

from shoal.data.batches import DataError, batches, eval_batches
from shoal.data.cut import cut_for
from shoal.data.stream import sharded_steps
from shoal.job import Data, Job, Train
from shoal.plan import Plan
from tests.data.sources import BrokenStream, OwnPart, Place, ShuffledStream, Stream
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def job(global_batch: int, workers: int = 0, **settings: Any) -> Job:
    train = Train(global_batch=global_batch, steps=20, eval_samples=settings.pop("eval_samples", None))
    return Job(data=Data(workers=workers, **settings), train=train)


def test_a_rank_without_a_sample_in_the_last_step_gets_a_filler() -> None:
    plan = Plan(replicate=4, micro_batch=1)
    last = [list(batches(Stream(9), job(8), plan, Place(rank, 4)))[-1] for rank in range(4)]
    assert [[micro.samples for micro in batch.micro_batches] for batch in last] == [
        [1, 0],
        [0, 0],
        [0, 0],
        [0, 0],
    ]
    assert [micro.first for batch in last for micro in batch.micro_batches] == list(range(8, 16))
    assert last[3].micro_batches[0].data.tolist() == [0]  # an earlier sample


def test_a_stream_that_ends_before_a_rank_has_any_still_gives_it_a_filler() -> None:
    found = list(batches(Stream(1), job(8), Plan(shard=2, micro_batch=4), Place(1, 2)))
    assert [(batch.step, batch.micro_batches[0].samples) for batch in found] == [(0, 0)]
    assert found[0].micro_batches[0].data.tolist() == [0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_draws_its_order_is_the_same_for_every_reader(workers: int) -> None:
    plan = Plan(shard=2, micro_batch=1)
    ranks = [list(batches(ShuffledStream(8), job(4, workers), plan, Place(rank, 2))) for rank in range(2)]
    read = [micro.data for rank in ranks for batch in rank for micro in batch.micro_batches]
    assert sorted(int(number) for number, _ in read) == list(range(8))
    assert len({float(noise) for _, noise in read}) == 8


def test_an_error_in_a_stream_names_the_sample() -> None:
    with pytest.raises(DataError, match="step 1: sample 6 of the stream: OSError: the socket is closed"):
        list(batches(BrokenStream(6), job(4), Plan(), Place(0, 1)))


def test_an_empty_stream_has_no_steps() -> None:
    assert list(batches(Stream(0), job(4), Plan(), Place(0, 1))) == []


def test_parts_of_their_own_are_refused_where_ranks_share_samples() -> None:
    with pytest.raises(ValueError, match="2 ranks share each sample"):
        batches(OwnPart((1,)), job(4, sharded=True), Plan(tensor=2), Place(0, 2))


@pytest.mark.parametrize("workers", [0, 3])
def test_one_rank_reads_its_own_part_alone(workers: int) -> None:
    found = list(batches(OwnPart((7,)), job(4, workers, sharded=True), Plan(micro_batch=2), Place(0, 1)))
    read = [
        number
        for batch in found
        for micro in batch.micro_batches
        if micro.samples
        for number in micro.data[1]
    ]
    assert read == list(range(7))
    assert [micro.samples for micro in found[1].micro_batches] == [2, 1]


def train_on_own_part(
    world: Any, lengths: tuple[int, ...], workers: int
) -> tuple[int, list[int], list[float]]:
    """Steps, samples that counted, and weights after gradient descent on the mean loss over the global batch."""
    multiprocessing.set_start_method("fork", force=True)  # a new fork server would import torch again
    ranks = len(lengths)
    dataset = OwnPart(lengths, world.rank)
    settings = job(ranks, workers, sharded=True)
    weights = torch.tensor([0.5, -0.25], dtype=torch.float64)
    counted: list[int] = []
    steps = 0
    for batch in batches(dataset, settings, Plan(replicate=ranks, micro_batch=1), world, deadline_s=30):
        steps += 1
        total = torch.zeros(3, dtype=torch.float64)
        for micro in batch.micro_batches:
            features, numbers = micro.data  # a filler has data too, so that a forward runs
            loss_gradient = (features.double() @ weights - 1.0) @ features.double()
            total += torch.cat((loss_gradient, torch.ones(1))) if micro.samples else 0.0
            counted += numbers.tolist() if micro.samples else []
        torch.distributed.all_reduce(total)
        weights = weights - 0.01 * total[:2] / total[2]
    return steps, counted, weights.tolist()


def train_alone(lengths: tuple[int, ...]) -> list[float]:
    """The same, in one process that sees all parts: step k has sample k of each part that has one."""
    weights = torch.tensor([0.5, -0.25], dtype=torch.float64)
    for step in range(max(lengths)):
        found = [sum(lengths[:rank]) + step for rank, length in enumerate(lengths) if step < length]
        features = torch.tensor([[1.0, float(number)] for number in found], dtype=torch.float64)
        weights = weights - 0.01 * (features @ weights - 1.0) @ features / len(found)
    return weights.tolist()


@pytest.mark.parametrize(("lengths", "workers"), [((3, 2), 0), ((0, 4), 0), ((5, 5, 1), 0), ((0, 4), 2)])
def test_ranks_with_parts_of_any_length_end_together_and_train_on_all_of_them(
    lengths: tuple[int, ...], workers: int
) -> None:
    answers = run_ranks(len(lengths), train_on_own_part, lengths, workers, timeout=60)
    assert [steps for steps, _, _ in answers] == [max(lengths)] * len(lengths)
    assert [len(counted) for _, counted, _ in answers] == list(lengths)
    assert sorted(number for _, counted, _ in answers for number in counted) == list(range(sum(lengths)))
    for _, _, weights in answers:
        assert weights == pytest.approx(train_alone(lengths), rel=1e-12)  # sums in another order, in fp64


def evaluate_own_part(world: Any) -> int:
    settings = job(4, sharded=True, eval_samples=5)
    steps = eval_batches(
        OwnPart((9, 1), world.rank), settings, Plan(shard=2, micro_batch=1), world, deadline_s=30
    )
    return sum(micro.samples for batch in steps for micro in batch.micro_batches)


def wait_in_vain(world: Any) -> str:
    if world.rank == 1:
        time.sleep(2)
        return "stayed away"
    cut = cut_for(Plan(shard=2), world, 4)
    with pytest.raises(DataError) as raised:
        list(sharded_steps(iter(()), cut, world, range(7, 9), deadline_s=0.5))
    return str(raised.value)


def test_evaluation_of_own_parts_shares_the_limit() -> None:
    assert run_ranks(2, evaluate_own_part, timeout=60) == [3, 1]


def test_a_rank_that_stays_away_is_reported_after_the_deadline() -> None:
    answers = run_ranks(2, wait_in_vain, timeout=60)
    assert "step 7: rank 0 waited 0 s for the other ranks" in answers[0]
