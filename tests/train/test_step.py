"""The step: the true norm, agreed skips, loss scales, fillers, and a stop that all ranks see."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from shoal.data.cut import MicroBatch, StepBatch
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.train.objective import Loss, NextToken, Supervised
from shoal.train.optimizer import SGD, AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import build, global_batch, part_of, whole_weights


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def norm_of(world: World, plan: Plan) -> float:
    model = parallelize(MLP, plan, world, precision="fp64", seed=1)
    step = Step(model, Supervised(mse), SGD(lr=0.1, momentum=0.0), plan, world, precision="fp64")
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    local = 8 // plan.data_degree
    at = plan.data_rank(world.rank) * local
    return step(
        StepBatch(0, (MicroBatch((x[at : at + local], x.flip(0)[at : at + local]), at, local),))
    ).grad_norm


@pytest.mark.parametrize(
    "plan",
    [Plan(replicate=4), Plan(shard=4), Plan(replicate=2, shard=2)],
    ids=["replicate", "shard", "hybrid"],
)
def test_the_gradient_norm_is_one_number_and_counts_each_element_once(plan: Plan) -> None:
    """A sum of squares over all ranks under hybrid sharding would be sqrt(2) too large (pytorch/torchtitan#596)."""
    torch.manual_seed(0)
    (expected,) = run_ranks(1, norm_of, Plan())
    norms = run_ranks(4, norm_of, plan)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected, rel=1e-12)


class Scripted:
    """A loss whose value a batch scripts: (inputs, factor)."""

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(output.float().square().sum() * batch[1], len(batch[0]))


def scripted(
    world: World,
    plan: Plan,
    factors: list[list[float]],
    precision: str = "fp32",
    scale: tuple[float, int] = (65536.0, 2000),
) -> list:
    """Steps whose loss is scaled by factors[step][rank]; returns (loss, skipped, weights' sum) a step."""
    model = parallelize(MLP, plan, world, precision=precision, seed=1)  # pyrefly: ignore
    step = Step(model, Scripted(), AdamW(lr=1e-2), plan, world, precision=precision, scale=scale)  # pyrefly: ignore
    found = []
    for index, by_rank in enumerate(factors):
        data = (torch.ones(2, 6), torch.tensor(by_rank[world.rank]))
        result = step(StepBatch(index, (MicroBatch(data, index, 2),)))
        total = sum(weight.double().sum().item() for weight in whole_weights(model).values())
        found.append(
            (
                result.numbers,
                total,
                {k: v.clone() for k, v in step.state().items() if k.startswith("loss_scale")},
            )
        )
    return found


@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(shard=2)], ids=["replicate", "shard"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_by_all(plan: Plan, bad: float) -> None:
    ranks = run_ranks(2, scripted, plan, [[1.0, 1.0], [1.0, bad], [1.0, 1.0]])
    for found in ranks:
        assert [numbers.skipped for numbers, _, _ in found] == [False, True, False]
        totals = [total for _, total, _ in found]
        assert totals[1] == totals[0] != totals[2]
        assert totals == [total for _, total, _ in ranks[0]]
    clean = run_ranks(2, scripted, plan, [[1.0, 1.0], [1.0, 1.0]])[0]
    assert ranks[0][2][1] == pytest.approx(clean[1][1], rel=1e-6)  # as if the skipped step had never been


def test_fp16s_loss_scale_halves_together_and_grows_after_finite_steps() -> None:
    factors = [[1.0, 1.0], [1.0, math.inf], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    ranks = run_ranks(2, scripted, Plan(replicate=2), factors, "fp16", (1024.0, 2))
    for found in ranks:
        assert [state["loss_scale.value"].item() for _, _, state in found] == [
            1024.0,
            512.0,
            512.0,
            1024.0,
            1024.0,
        ]


def test_a_loss_scale_that_is_too_large_is_found_and_training_goes_on() -> None:
    found = run_ranks(1, scripted, Plan(), [[1e2]] * 16, "fp16", (2.0**20, 1000))[0]
    skipped = [numbers.skipped for numbers, _, _ in found]
    assert skipped[0] and not skipped[-1]


def empty(world: World) -> tuple[bool, float, bool]:
    model = parallelize(build, Plan(shard=2), world)
    step = Step(model, NextToken(), AdamW(lr=1e-2), Plan(shard=2), world)
    before = {name: weight.clone() for name, weight in whole_weights(model).items()}
    batch = global_batch(0)
    batch["labels"][:] = -100
    numbers = step(part_of(batch, 0, Plan(shard=2), world.rank)).numbers
    same = all(torch.equal(weight, before[name]) for name, weight in whole_weights(model).items())
    return numbers.skipped, numbers.weight, same


def test_a_global_batch_without_a_label_is_skipped_and_not_nan() -> None:
    assert run_ranks(2, empty) == [(True, 0.0, True)] * 2


def with_filler(world: World, filler: bool) -> float:
    """Rank 1 has one micro-batch less than rank 0; it runs a filler so that both do the same work."""
    plan = Plan(shard=2, zero=2)
    model = parallelize(build, plan, world, precision="fp64", seed=3)
    step = Step(model, NextToken(), AdamW(lr=1e-2), plan, world, precision="fp64")
    whole = global_batch(0)
    parts = {0: [(0, 4), (4, 8)], 1: [(8, 12)]}[world.rank]
    micro = [MicroBatch({k: v[a:b] for k, v in whole.items()}, a, b - a) for a, b in parts]
    if world.rank == 1:
        micro.append(micro[0]._replace(samples=0))
    return step(StepBatch(0, tuple(micro))).loss


def test_a_filler_keeps_ranks_in_step_and_adds_nothing() -> None:
    losses = run_ranks(2, with_filler, True)
    assert losses[0] == losses[1] == pytest.approx(run_ranks(1, three_quarters)[0], rel=1e-12)


def three_quarters(world: World) -> float:
    model = parallelize(build, Plan(), world, precision="fp64", seed=3)
    step = Step(model, NextToken(), AdamW(lr=1e-2), Plan(), world, precision="fp64")
    whole = {key: value[:12] for key, value in global_batch(0).items()}
    return step(StepBatch(0, (MicroBatch(whole, 0, 12),))).loss


def stopping(world: World) -> tuple[bool, bool]:
    plan = Plan(replicate=2)
    model = parallelize(build, plan, world)
    step = Step(model, NextToken(), AdamW(lr=1e-2), plan, world)
    first = step(part_of(global_batch(0), 0, plan, world.rank))
    second = step(part_of(global_batch(1), 1, plan, world.rank), stop=world.rank == 1)
    return first.numbers.stop, second.numbers.stop


def test_one_rank_that_asks_to_stop_is_heard_by_all() -> None:
    assert run_ranks(2, stopping) == [(False, True)] * 2


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        run_ranks(1, nothing_to_train)


def nothing_to_train(world: World) -> None:
    model = parallelize(MLP, Plan(), world)
    model.requires_grad_(False)
    Step(model, Supervised(mse), AdamW(), Plan(), world)
