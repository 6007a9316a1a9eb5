"""What is gathered and scattered, in which order; and that compiled blocks keep it inside of one graph, forward and backward."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from shoal.parallel.apply import parallelize
from shoal.parallel.collectives import all_gather, reduce_scatter
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.step import Step
from shoal.world import World
from tests.ranks import run_ranks
from tests.train.toy import DEEP, OPTIMIZER, build, global_batch, part_of

Graphs = list[Counter[str]]
"""Collectives of each graph that was compiled"""

WHOLE = torch.arange(48.0).view(2, 4, 6)
CASES = [
    (x, dim)
    for x in (WHOLE, WHOLE.transpose(0, 2), WHOLE[:1].transpose(1, 2))
    for dim in range(3)
    if x.shape[dim] % 2 == 0
]


def compiled(world: World, plan: Plan) -> tuple[Graphs, Graphs, Counter[str]]:
    """Graphs forward and backward of two steps, and why they were cut."""
    forward, backward = [], []

    def kept(graphs: Graphs, graph: torch.fx.GraphModule, _: Any) -> Any:
        names = [str(node.target).split(".") for node in graph.graph.nodes]
        graphs.append(Counter(name[1] for name in names if name[0] == "_c10d_functional"))
        return graph

    backend = aot_autograd(fw_compiler=partial(kept, forward), bw_compiler=partial(kept, backward))
    counters.clear()
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        model = parallelize(partial(build, DEEP), plan, world, seed=7)
        step = Step(model, NextToken(), OPTIMIZER, plan, world, total_steps=2)
    for index in range(2):
        step(part_of(global_batch(index), index, plan, world.rank))
    return forward, backward, counters["graph_break"]


def test_a_block_of_the_tensor_axis_is_one_graph_with_its_collectives() -> None:
    """Of several samples, whose parts of the sequence do not lie one after the other."""
    plan = Plan(tensor=2, micro_batch=8, compile=True)
    for forward, backward, breaks in run_ranks(2, compiled, plan):
        assert not breaks
        # attention and feed-forward each gather and scatter, and in backward the other way; four blocks are alike
        both = Counter(all_gather_into_tensor=2, reduce_scatter_tensor=2, wait_tensor=4)
        assert forward == [both]
        assert backward == [both]


def joined_and_cut(world: World) -> tuple[list[Tensor], list[Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    mine = [(x + 100 * world.rank, dim) for x, dim in CASES]
    return [all_gather(x, dim, group) for x, dim in mine], [reduce_scatter(x, dim, group) for x, dim in mine]


def test_parts_go_and_come_in_rank_order_along_any_dim_however_a_tensor_lies_in_memory() -> None:
    joined = [torch.cat((x, x + 100), dim) for x, dim in CASES]
    for rank, (gathered, cut) in enumerate(run_ranks(2, joined_and_cut)):
        assert all(map(torch.equal, gathered, joined))
        assert all(map(torch.equal, cut, [(2 * x + 100).chunk(2, dim)[rank] for x, dim in CASES]))
