"""The mixture-of-experts family as plain single-device code: Llama's attention, and in every block many feed-forward parts, of
which a router sends each token to a few.

No token is dropped, whatever its experts have to do (Gale et al. 2022, MegaBlocks, arXiv:2211.15841). Experts are kept equally
busy by a bias on their scores that only decides which are taken (Wang et al. 2024, arXiv:2408.15664), so that no auxiliary loss
disturbs the gradients. Shapes: N tokens, D width, E experts, K of them for each token, F hidden width of an expert.

Sources: Shazeer et al. 2017 (arXiv:1701.06538); Jiang et al. 2024 (Mixtral, arXiv:2401.04088); Dai et al. 2024 (DeepSeekMoE,
shared experts, arXiv:2401.06066).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.layout import Layout
from shoal.models.grouped import grouped_matmul, take_rows
from shoal.models.llama import FeedForward, Llama
from shoal.models.moe_presets import MoeDims


class Routed(NamedTuple):
    """Where tokens go."""

    expert: Tensor
    """(N, K) indices"""
    weight: Tensor
    """(N, K) of the experts' outputs, in fp32, or fp64 for fp64 tokens"""
    counts: Tensor
    """(E,) tokens of each expert"""


class Router(nn.Module):
    """Scores every expert for each token and takes the best, as their biases have it.

    [Note: balance] `load` counts the tokens of each expert since the last optimizer step. `Step` adds up the counts of all ranks
    and micro-batches and calls `rebalance` once, so that the bias is a function of the global batch alone and equal for every
    plan. Tokens count while the model trains and gradients are recorded; `Step` turns `counting` off for a micro-batch
    that only keeps ranks in step. A block that is recomputed has its buffers put back.
    """

    load: Tensor
    bias: Tensor

    def __init__(self, dims: MoeDims) -> None:
        super().__init__()
        self.top_k, self.scoring, self.balance_rate = dims.top_k, dims.scoring, dims.balance_rate
        self.weight = nn.Parameter(torch.empty(dims.experts, dims.base.dim).normal_(0.0, 0.02))
        self.register_buffer("bias", torch.zeros(dims.experts))
        self.register_buffer("load", torch.zeros(dims.experts, dtype=torch.long))
        self.counting = True

    def init_buffers(self) -> None:
        """Set the buffers' initial values, in place."""
        self.bias.zero_()
        self.load.zero_()

    def forward(self, x: Tensor) -> Routed:
        """Where the tokens (N, D) go."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        expert = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weight = scores.gather(-1, expert)
        if self.top_k > 1:  # one weight made to add up to 1 would be 1, and teach the router nothing
            weight = weight / weight.sum(-1, keepdim=True)
        counts = torch.zeros_like(self.load)
        counts.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten()))
        if self.training and self.counting and torch.is_grad_enabled():
            self.load += counts
        return Routed(expert, weight, counts)

    @torch.no_grad()
    def rebalance(self, skip: Tensor) -> None:
        """Move the bias of experts with fewer tokens than the mean up and of those with more down, and count anew.

        Args:
            skip: (), true for a step that is left out, which moves nothing.
        """
        # whole numbers, so that an expert with just the mean stays where it is
        below = (self.load.sum() - self.load * len(self.load)).sign()
        self.bias += below.to(self.bias.dtype) * self.balance_rate * ~skip
        self.load.zero_()


class Experts(nn.Module):
    """E feed-forward parts (SwiGLU) with their weights stacked: down(silu(gate(x)) * up(x))."""

    def __init__(self, dims: MoeDims) -> None:
        super().__init__()
        inwards = (dims.experts, dims.expert_ffn, dims.base.dim)
        self.gate = nn.Parameter(torch.empty(inwards).normal_(0.0, 0.02))
        self.up = nn.Parameter(torch.empty(inwards).normal_(0.0, 0.02))
        self.down = nn.Parameter(torch.empty(dims.experts, dims.base.dim, dims.expert_ffn).normal_(0.0, 0.02))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """What experts make of their rows (rows, D), which are sorted by expert, `counts` (E,) of each."""
        hidden = F.silu(grouped_matmul(x, self.gate, counts)) * grouped_matmul(x, self.up, counts)
        return grouped_matmul(hidden, self.down, counts)


class MixtureOfExperts(nn.Module):
    """The sum of what a token's experts make of it, by weight, and of what the shared experts do."""

    def __init__(self, dims: MoeDims) -> None:
        super().__init__()
        self.router = Router(dims)
        self.experts = Experts(dims)
        self.shared = FeedForward(dims.base) if dims.base.ffn else None  # as wide as all shared ones together

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)  # (N, D)
        routed = self.router(flat)
        copies = routed.expert.shape[-1]
        order = routed.expert.flatten().argsort(
            stable=True
        )  # of N * K rows: token by token, then expert by expert
        inverse = order.argsort()
        made = self.experts(take_rows(flat, order, inverse, copies), routed.counts)
        made = take_rows(made, inverse, order).view(-1, copies, flat.shape[-1])
        mixed = (made * routed.weight[..., None].to(made.dtype)).sum(1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)


class Moe(Llama):
    """A decoder as Llama, with a mixture of experts in place of every feed-forward part.

    Example:
        >>> from shoal.job import Model
        >>> from shoal.models.moe_presets import resolve_moe
        >>> Moe(resolve_moe(Model(family="moe", preset="4x1m"), vocab=512))(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 512])
    """

    def __init__(self, dims: MoeDims) -> None:
        super().__init__(dims.base, lambda _: MixtureOfExperts(dims))
        self.moe_dims = dims

    def layout(self) -> Layout:
        """How this model can be cut."""
        shared, counts = "blocks.*.feed_forward.shared", dict(super().layout().counts)
        del counts["model.ffn"]
        has_shared = self.dims.ffn > 0
        if has_shared:
            counts["model.shared_experts x model.expert_ffn"] = self.dims.ffn
        return dataclasses.replace(
            super().layout(),
            column=("blocks.*.attention.query", *((f"{shared}.gate", f"{shared}.up") if has_shared else ())),
            row=("blocks.*.attention.output", *((f"{shared}.down",) if has_shared else ())),
            region=("blocks.*.attention", *((shared,) if has_shared else ())),
            experts=("blocks.*.feed_forward.experts",),
            counts=counts,
        )

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Set one whole parameter's initial value in place; called with a generator of the parameter's own."""
        alias = {"experts.down": "down.weight", "shared.down.weight": "down.weight"}
        for ending, plain in alias.items():  # they end on the residual stream as a feed-forward part's does
            name = name.replace(f"feed_forward.{ending}", f"feed_forward.{plain}")
        super().init_parameter(name, tensor, generator)
