"""Attention by blocks of keys is attention, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel import attend as attending
from shoal.parallel.attend import Attended, attend, attend_backward, merge
from shoal.parallel.context import RingAttention, Sequence
from shoal.plan import Plan
from shoal.world import World
from tests.ranks import run_ranks

LENGTH = 16


def inputs(kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, 8), (2, kv_heads, LENGTH, 8), (2, kv_heads, LENGTH, 8), (2, 4, LENGTH, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def truth(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of torch's attention."""
    leaves = [x.clone().requires_grad_(True) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_two_blocks_make_one_attention(kv_heads: int, plain: bool) -> None:
    query, key, value, gradient = inputs(kv_heads)
    if plain:
        wide_key, wide_value = (attending._expanded(query, x) for x in (key, value))
        one = attending._attend_plainly(query, wide_key, wide_value, causal=True)
        whole = attend(query, key, value, causal=True)
        torch.testing.assert_close(one.out, whole.out)
        torch.testing.assert_close(one.lse, whole.lse)
        mine = attending._plain_backward(gradient, query, wide_key, wide_value, one, True)
        theirs = attend_backward(gradient, query, wide_key, wide_value, whole, causal=True)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
        return
    half = LENGTH // 2
    late, late_gradient = query[:, :, half:], gradient[:, :, half:].contiguous()
    own = attend(late, key[:, :, half:], value[:, :, half:], causal=True)
    both = merge(own, attend(late, key[:, :, :half], value[:, :, :half], causal=False))
    right = truth(query, key, value, gradient)
    torch.testing.assert_close(both.out, right[0][:, :, half:])
    whole = Attended(both.out, both.lse)
    _, dk, dv = attend_backward(late_gradient, late, key[:, :, half:], value[:, :, half:], whole, causal=True)
    torch.testing.assert_close(dk, right[2][:, :, half:])
    torch.testing.assert_close(dv, right[3][:, :, half:])


def ring(world: World) -> list[Tensor]:
    """A rank's part of the output and gradients, in the sequence's order after they are put together."""
    group = dist.group.WORLD
    assert group is not None
    sequence = Sequence(Plan(context=world.size), group)
    parts = [sequence.cut(x, 2) for x in inputs()]
    leaves = [x.requires_grad_(True) for x in parts[:3]]
    out = RingAttention.apply(*leaves, group)
    found = [out.detach(), *torch.autograd.grad(out, leaves, parts[3])]
    return [sequence.whole(x, 2) for x in found]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_ring_is_the_whole(ranks: int) -> None:
    right = truth(*inputs())
    for found in run_ranks(ranks, ring):
        for mine, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_each_rank_of_a_ring_has_as_much_to_look_at() -> None:
    costs = run_ranks(4, cost_of_rank)
    assert len(set(costs)) == 1


def cost_of_rank(world: World) -> int:
    """Pairs of a query and a key that is not later."""
    group = dist.group.WORLD
    assert group is not None
    return int((Sequence(Plan(context=4), group).index(64) + 1).sum())


def test_a_sequence_that_cannot_be_cut_evenly_says_what_can() -> None:
    with pytest.raises(ValueError, match=r"12 tokens cannot be cut into 8 pieces for plan\.context = 4"):
        run_ranks(4, cut_badly)


def cut_badly(world: World) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return Sequence(Plan(context=4), group).index(12)
