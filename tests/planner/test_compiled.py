"""Compiled blocks hold, to the byte, what was simulated without a compiler: real ones are compiled by Inductor, for the CPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.cluster import Cluster
from shoal.models.llama import Llama
from shoal.plan import Plan
from shoal.planner.compiled import _partition
from shoal.planner.simulate import simulate
from tests.planner.real import DIMS, simulated_peak, work
from tests.planner.test_simulate import compare

# so did, where it was tried: without recompute; compile = "model"; tensor = 2; shard = 2 with micro-batches. A real compilation
# takes 10 to 30 s of a core
ALONE: list[dict[str, Any]] = [{"compile": True, "recompute": "selective"}]


def test_a_compiled_model_holds_what_was_simulated() -> None:
    compare(ALONE)


@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline": 2, "micro_batch": 2},
        {"context": 2, "shard": 2},
    ],
    ids=str,
)
def test_compiled_blocks_of_a_gpu_hold_less_than_eager_ones(keys: dict[str, Any]) -> None:
    plan = Plan.model_validate({**keys, "compile": True})
    cluster = Cluster.parse(f"{plan.world_size} h100")
    compiled, eager = (
        simulated_peak(simulate(work(), each, cluster), "cuda")
        for each in (plan, plan.model_copy(update={"compile": False}))
    )
    assert compiled < eager


def test_afterwards_compile_is_torchs_own() -> None:
    before = torch.compile
    simulate(work(), Plan(compile=True), Cluster.parse("1 h100"))
    assert torch.compile is before

    @torch.compile(backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("padding", [(0, 0), (0, 2)])
def test_a_padding_of_nothing_is_no_operation_of_the_graph(padding: tuple[int, int]) -> None:
    """So that what is padded can be computed again in backward, as Inductor does it."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.sin(), padding).cos()

    joint = make_fx(padded, tracing_mode="fake")(torch.ones(4, 4))
    with patch("torch._functorch.partitioners.min_cut_rematerialization_partition") as cut:
        _partition(joint, [])
    nodes = [str(node.target) for node in cut.call_args.args[0].graph.nodes]
    assert ("aten.constant_pad_nd.default" in nodes) == (padding != (0, 0))


def test_a_tensor_that_only_holds_others_takes_no_memory() -> None:
    """A weight in float8 is bytes and a scale; what it looks like from outside is nowhere."""
    pytest.importorskip("torchao")
    plan, cluster = Plan(shard=2, zero=3), Cluster.parse("2 h100")
    wide = work(lambda: Llama(DIMS))._replace(precision="float8_gather")
    trace = simulate(wide, plan, cluster)
    assert not [storage for storage in trace.storages if storage.operator == "aten.detach.default"]
    gathered = [storage for storage in trace.storages if storage.kind == "gathered"]
    assert {storage.dtype for storage in gathered} == {"uint8", "bfloat16"}
