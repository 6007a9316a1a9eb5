"""Expert parallelism trains as one process that takes token by token: whatever the other axes, and whoever gets no token."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.checkpoint.store import load, model_state, newest, save
from shoal.layout import Layout
from shoal.models.llama import Llama
from shoal.models.moe import Moe, Router
from shoal.models.moe_presets import MoeDims
from shoal.parallel import shard
from shoal.parallel.apply import parallelize
from shoal.parallel.collectives import exchange_rows
from shoal.parallel.expert import _compiled
from shoal.parallel.initialise import whole_tensor
from shoal.plan import Plan
from shoal.world import World
from tests.ranks import Outcome, run_all, run_ranks
from tests.train.moe_toy import BATCH, DIMS, LENGTH, STEPS, Record, set_up, train, train_by_hand
from tests.train.toy import DEEP, global_batch, part_of

# sums in another order differ by about 1e-15 relative in fp64; AdamW divides small numbers by small numbers
TOLERANCE = 1e-10


def plan_of(**keys: Any) -> Plan:
    return Plan.model_validate(keys)


PLANS = {
    "one device": plan_of(),
    "accumulation": plan_of(micro_batch=4),
    "replicate": plan_of(replicate=2),
    "shard": plan_of(shard=2),
    "tensor": plan_of(tensor=2),
    "pipeline": plan_of(pipeline=2, shard=2, micro_batch=2, zero=3),
    "expert, zero 1": plan_of(shard=2, expert=2, zero=1, micro_batch=2),
    "expert, zero 2": plan_of(shard=2, expert=2, zero=2, micro_batch=2),
    "expert, zero 3": plan_of(shard=2, expert=2, zero=3, micro_batch=2),
    "expert, recompute": plan_of(shard=2, expert=2, recompute="full", micro_batch=4),
    "expert x shard": plan_of(shard=4, expert=2),
    "every expert alone": plan_of(shard=4, expert=4, zero=1),
    "expert x replicate": plan_of(replicate=2, shard=2, expert=2, zero=2, micro_batch=2),
    "expert x tensor": plan_of(shard=2, tensor=2, expert=2),
    "expert over tensor": plan_of(tensor=2, expert=2, micro_batch=8),
    "expert over shard and tensor": plan_of(shard=2, tensor=2, expert=4),
    "expert over context": plan_of(context=2, expert=2),
    "expert over shard and context": plan_of(shard=2, context=2, expert=4, context_by="all_to_all"),
    "expert x pipeline": plan_of(pipeline=2, shard=2, expert=2, micro_batch=2),
    "expert x pipeline, zero 3": plan_of(pipeline=2, shard=2, expert=2, micro_batch=2, zero=3),
}


@lru_cache
def by_hand(dims: MoeDims = DIMS, never: tuple[int, ...] = ()) -> Record:
    return train_by_hand(dims, never=never)


def assert_same(records: list[Record], reference: Record) -> None:
    seen: set[str] = set()
    for record in records:
        assert record.initial_hash == reference.initial_hash
        assert record.losses == pytest.approx(reference.losses, rel=TOLERANCE)
        assert record.norms == pytest.approx(reference.norms, rel=TOLERANCE)
        for name, weight in record.weights.items():
            whole = reference.weights[name]
            close = TOLERANCE * float(whole.abs().max())
            torch.testing.assert_close(weight, whole, rtol=0, atol=close, msg=name)
        for (
            name,
            bias,
        ) in record.biases.items():  # moved by whole rates: equal, up to the rounding of their sum
            torch.testing.assert_close(bias, reference.biases[name], rtol=0, atol=1e-14, msg=name)
        seen |= {*record.weights, *record.biases}
    assert seen == {*reference.weights, *reference.biases}


@lru_cache
def trained(ranks: int) -> dict[str, Outcome]:
    return run_all(ranks, train, {name: (plan,) for name, plan in PLANS.items() if plan.world_size == ranks})


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_one_process_does(name: str) -> None:
    reference = by_hand()
    assert any(bool(bias.any()) for bias in reference.biases.values())
    assert_same(trained(PLANS[name].world_size)[name].get(), reference)


@pytest.mark.parametrize("never", [(1,), (0, 1)], ids=["one expert", "all experts of a rank"])
def test_experts_that_get_no_token_only_decay(never: tuple[int, ...]) -> None:
    plan = plan_of(shard=2, expert=2, micro_batch=4)
    assert_same(run_ranks(2, train, plan, DIMS, STEPS, never), by_hand(DIMS, never))


def train_as_on_older_torch(world: World, plan: Plan, never: tuple[int, ...]) -> Record:
    with (
        patch.object(shard, "is_needed", lambda: True),
        patch.object(shard, "_count_unused", lambda module: None),
    ):
        return train(world, plan, never=never)


@pytest.mark.parametrize(
    "plan", [plan_of(shard=2, expert=2), plan_of(shard=4, expert=2, zero=2, micro_batch=2)]
)
def test_experts_that_get_no_token_also_work_with_torch_before_2_13(plan: Plan) -> None:
    found = run_ranks(plan.world_size, train_as_on_older_torch, plan, (1,))
    assert_same(found, by_hand(DIMS, (1,)))


def test_all_tokens_may_go_to_one_expert() -> None:
    dims, never = DIMS._replace(top_k=1), (0, 1, 3)
    plan = plan_of(shard=2, tensor=2, expert=4, micro_batch=4)
    assert_same(run_ranks(4, train, plan, dims, STEPS, never), by_hand(dims, never))


def test_experts_without_shared_ones_scored_by_sigmoid() -> None:
    dims = DIMS._replace(scoring="sigmoid", top_k=3, base=DIMS.base._replace(ffn=0))
    assert_same(run_ranks(4, train, plan_of(shard=2, tensor=2, expert=2), dims), by_hand(dims))


def test_fewer_experts_than_ranks_are_cut_along_another_dim() -> None:
    dims = DIMS._replace(experts=2, top_k=1)
    assert_same(run_ranks(4, train, plan_of(shard=4, expert=2), dims), by_hand(dims))
    assert_same(run_ranks(4, train, plan_of(shard=4), dims), by_hand(dims))


def parts(world: World, plan: Plan) -> dict[str, tuple[int, ...]]:
    model = parallelize(lambda: Moe(DIMS), plan, world)
    return {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}


def test_a_rank_has_its_experts_and_of_those_its_part() -> None:
    for shapes in run_ranks(4, parts, plan_of(shard=2, tensor=2, expert=2)):
        assert shapes["blocks.0.feed_forward.experts.up"] == (
            1,
            20,
            24,
        )  # of (4, 20, 24): 2 experts on 2 ranks
        assert shapes["blocks.0.feed_forward.router.weight"] == (2, 24)  # on both ranks of the tensor axis


class Counts:
    """What each router was told when the bias moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[list[int]] = []
        rebalance = Router.rebalance

        def told(router: Router, skip: Tensor) -> None:
            self.seen.append(router.load.tolist())
            rebalance(router, skip)

        monkeypatch.setattr(Router, "rebalance", told)


def counts_of_a_step(world: World, plan: Plan, filler: bool) -> list[list[int]]:
    step = set_up(world, plan, steps=1)
    batch = part_of(global_batch(0), 0, plan, world.rank)
    if filler:
        batch = batch._replace(
            micro_batches=(*batch.micro_batches, batch.micro_batches[0]._replace(samples=0))
        )
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch)
        step(batch)
    return counts.seen


COUNTED = [
    plan_of(micro_batch=4, recompute="full"),
    plan_of(replicate=2),
    plan_of(shard=2, expert=2, micro_batch=2, recompute="full"),
    plan_of(tensor=2, context=2, expert=2),
    plan_of(pipeline=2, micro_batch=4),
]


@lru_cache
def counted(ranks: int) -> dict[tuple[str, bool], Outcome]:
    plans = [plan for plan in COUNTED if plan.world_size == ranks]
    cases = {(plan.describe(), filler): (plan, filler) for plan in plans for filler in (False, True)}
    return run_all(ranks, counts_of_a_step, cases)


@pytest.mark.parametrize("filler", [False, True], ids=["", "filler"])
@pytest.mark.parametrize("plan", COUNTED, ids=Plan.describe)
def test_each_token_of_the_global_batch_counts_once(plan: Plan, filler: bool) -> None:
    for seen in counted(plan.world_size)[plan.describe(), filler].get():
        assert len(seen) == DIMS.base.layers // plan.pipeline
        assert [sum(counts) for counts in seen] == [BATCH * LENGTH * DIMS.top_k] * len(seen)


def saved_and_loaded(world: World, plan: Plan, folder: Path) -> dict[str, Tensor]:
    """The state after three steps, saved under a plan or, in one process, loaded."""
    step = set_up(world, plan)
    if world.size > 1:
        for index in range(3):
            step(part_of(global_batch(index), index, plan, world.rank))
    state = model_state(step.model) | step.state()
    if world.size > 1:
        save(folder, 3, state, {}, world, keep=1)
    else:
        found, _ = newest(folder, world)
        assert found is not None
        load(found, state, world)
    return {name: whole_tensor(value).clone() for name, value in state.items()}


@pytest.mark.parametrize(
    "plan", [plan_of(shard=2, expert=2), plan_of(shard=2, tensor=2, expert=2)], ids=Plan.describe
)
def test_a_checkpoint_of_shared_experts_is_read_by_one_process_bit_for_bit(
    plan: Plan, tmp_path: Path
) -> None:
    written = run_ranks(plan.world_size, saved_and_loaded, plan, tmp_path)[0]
    read = run_ranks(1, saved_and_loaded, Plan(), tmp_path)[0]
    assert set(read) == set(written)
    assert any(name.startswith("buffer.") and bool(value.any()) for name, value in read.items())
    for name, value in written.items():
        assert torch.equal(read[name], value), name


def rows_exchanged(world: World) -> tuple[list[float], list[float]]:
    """Rank 0 sends 3 rows to rank 1 and nobody sends any to rank 0; gradients say where they came from."""
    send, receive = ([0, 3], [0, 0]) if world.rank == 0 else ([0, 0], [3, 0])
    x = torch.arange(float(sum(send))).view(-1, 1).requires_grad_()
    group = world.mesh(Plan(shard=2)).get_group("shard")
    y = exchange_rows(x, send, receive, group)
    (gradient,) = torch.autograd.grad((y * 10).sum(), x)
    return y.flatten().tolist(), gradient.flatten().tolist()


def test_rows_go_to_a_rank_that_sends_none_and_gradients_come_back() -> None:
    assert run_ranks(2, rows_exchanged) == [([], [10.0] * 3), ([0.0, 1.0, 2.0], [])]


def refused(world: World, model: type[nn.Module], plan: Plan) -> str:
    try:
        parallelize(model, plan, world)
    except ValueError as error:
        return str(error)
    return ""


class Dense(Llama):
    def __init__(self) -> None:
        super().__init__(DEEP)


class Odd(Moe):
    def __init__(self) -> None:
        super().__init__(DIMS._replace(experts=3))


class WithoutSequence(Moe):
    def __init__(self) -> None:
        super().__init__(DIMS)

    def layout(self) -> Layout:
        return Layout(experts=("blocks.*.feed_forward.experts",))


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (Dense, plan_of(shard=2, expert=2), ["layout names none", "plan.expert = 1"]),
        (Odd, plan_of(shard=2, expert=2), ["the 3 experts", "these do: [1, 3]"]),
        (WithoutSequence, plan_of(tensor=2, expert=2), ["sequence_dim", "use plan.tensor = 1"]),
    ],
    ids=["no experts", "three experts", "no sequence parallelism"],
)
def test_a_model_that_cannot_share_its_experts_is_refused(
    model: type[nn.Module], plan: Plan, words: list[str]
) -> None:
    for text in run_ranks(plan.world_size, refused, model, plan):
        assert f"plan.expert = {plan.expert}" in text
        assert all(word in text for word in words)


def test_experts_are_compiled_once_whatever_number_of_rows_they_get() -> None:
    graphs: list[torch.fx.GraphModule] = []
    weight = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        member = (torch.arange(len(x)) >= counts[0]).long()
        return torch.einsum("nk,nmk->nm", x, weight[member]) if len(x) > 0 else x @ weight.sum(0)

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        run = _compiled(forward)
    for counts in ([5, 4], [2, 0], [0, 3], [0, 0], [1, 0], [0, 1], [300, 20]):
        x = torch.randn(sum(counts), 4, dtype=torch.float64)
        torch.testing.assert_close(run(x, torch.tensor(counts)), forward(x, torch.tensor(counts)))
    assert len(graphs) == 1
