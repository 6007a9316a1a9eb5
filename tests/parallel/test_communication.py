"""What a step sends is what its plan says: ZeRO stages differ in it, and accumulation sends no more than it must."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.resilience.collectives import FORMS, intercept
from shoal.train.objective import NextToken
from shoal.train.optimizer import AdamW
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import BATCH, DIMS, build, global_batch, part_of

GROUPS = DIMS.layers + 1  # of parameters that are gathered and reduced together: each block, and the root
GATHERS = ("_allgather_base_", "allgather_into_tensor_coalesced_")
REDUCES = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")


def sent(world: World, plan: Plan) -> Counter[str]:
    """Launches of collectives in the second step, which has no first-time work."""
    model = parallelize(build, plan, world)
    step = Step(model, NextToken(), AdamW(), plan, world)
    step(part_of(global_batch(0), 0, plan, world.rank))
    counts: Counter[str] = Counter()
    library = torch.library.Library("c10d", "IMPL")
    for name in FORMS:
        if name in (*GATHERS, *REDUCES, "allreduce_"):
            intercept(library, name, lambda _, name=name: counts.update([name]))
    step(part_of(global_batch(1), 1, plan, world.rank))
    library._destroy()
    return Counter(
        gathers=sum(counts[name] for name in GATHERS),
        reduces=sum(counts[name] for name in REDUCES),
        all_reduces=counts["allreduce_"],
    )


def counted(collective: Any, name: str, counts: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return collective(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("zero", "micro_batches", "gathers", "reduces"),
    [
        (1, 1, GROUPS, GROUPS),
        (2, 1, GROUPS, GROUPS),
        (3, 1, GROUPS + DIMS.layers, GROUPS),  # blocks are gathered again in backward
        (1, 4, GROUPS, GROUPS),  # once a step
        (2, 4, GROUPS, 4 * GROUPS),  # gradients are cut after every micro-batch
        (3, 4, 4 * (GROUPS + DIMS.layers), 4 * GROUPS),
    ],
)
def test_each_zero_stage_sends_what_it_must(
    zero: int, micro_batches: int, gathers: int, reduces: int
) -> None:
    plan = Plan.model_validate({"shard": 2, "zero": zero, "micro_batch": BATCH // 2 // micro_batches})
    for found in run_ranks(2, sent, plan):
        assert found == Counter(gathers=gathers, reduces=reduces, all_reduces=1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_of_a_cut_model_all_reduce_once_a_step(zero: int) -> None:
    plan = Plan.model_validate({"replicate": 2, "shard": 2, "zero": zero, "micro_batch": 1})
    for found in run_ranks(4, sent, plan):
        assert found["all_reduces"] == GROUPS + 1  # and the step's own numbers


def ddp_buckets(world: World, plan: Plan) -> int:
    model = parallelize(build, plan, world)
    assert isinstance(model, DistributedDataParallel)
    counts: Counter[str] = Counter()
    # not annotated: DDP refuses annotations that are text, as they are in this file
    hook = counted(allreduce_hook, "buckets", counts)
    model.register_comm_hook(None, lambda group, bucket: hook(group, bucket))
    step = Step(model, NextToken(), AdamW(), plan, world)
    step(part_of(global_batch(0), 0, plan, world.rank))
    return counts["buckets"]


def test_copies_send_gradients_once_a_step_however_many_micro_batches() -> None:
    one, four = (run_ranks(2, ddp_buckets, Plan(replicate=2, micro_batch=size))[0] for size in (8, 2))
    assert one == four > 0
