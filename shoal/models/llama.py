"""The Llama family as plain single-device code: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing here knows of ranks; `shoal.parallel` spreads it. Shapes: B samples, T tokens, D width, H query heads, K key/value
heads, E width of a head, V vocabulary.

Sources: Touvron et al. 2023 (arXiv:2302.13971); Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.layout import Layout
from shoal.models.presets import LlamaDims


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, dims: LlamaDims) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.query = nn.Linear(dims.dim, dims.heads * self.head_dim, bias=False)
        self.key = nn.Linear(dims.dim, dims.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dims.dim, dims.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(dims.heads * self.head_dim, dims.dim, bias=False)
        self.attend = causal_attention

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        query, key, value = (
            project(x).view(B, T, -1, self.head_dim) for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, rotary), rotate(key, rotary)
        mixed = self.attend(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask
        )  # (B, H, T, E)
        return self.output(mixed.transpose(1, 2).reshape(B, T, -1))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention of (B, H, T, E) to (B, K, T, E), looking back only or as a mask says."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dims: LlamaDims) -> None:
        super().__init__()
        self.gate = nn.Linear(dims.dim, dims.ffn, bias=False)
        self.up = nn.Linear(dims.dim, dims.ffn, bias=False)
        self.down = nn.Linear(dims.ffn, dims.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, dims: LlamaDims, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dims.dim, eps=dims.norm_eps)
        self.attention = Attention(dims)
        self.feed_forward_norm = nn.RMSNorm(dims.dim, eps=dims.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """A decoder: embedding, blocks, norm, head.

    Example:
        >>> from shoal.job import Model
        >>> from shoal.models.presets import resolve
        >>> Llama(resolve(Model(preset="1m"), vocab=512))(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 512])
    """

    cast_unit_inputs = False  # blocks get the rotary table in fp32, also in bf16 runs
    uses_every_parameter = True  # so that gradients need no search for those that a forward left out

    def __init__(self, dims: LlamaDims, feed_forward: Callable[[LlamaDims], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.dims = dims
        self.embedding = nn.Embedding(dims.vocab, dims.dim)
        self.blocks = nn.ModuleList(Block(dims, feed_forward(dims)) for _ in range(dims.layers))
        self.norm = nn.RMSNorm(dims.dim, eps=dims.norm_eps)
        self.head = nn.Linear(dims.dim, dims.vocab, bias=False)
        if dims.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V) of the next token.

        Args:
            tokens: (B, T) ids.
            positions: (B, T), left out: 0 to T-1.
            documents: (B, T) ids; attention stays inside a document. Left out: one document.
        """
        side = self.side_inputs(tokens, positions, documents)
        x = self.begin(tokens)
        for block in self.blocks:
            x = block(x, *side)
        return self.end(x)

    def begin(self, tokens: Tensor, *_: Tensor | None, **__: Tensor | None) -> Tensor:
        """What comes before the blocks: (B, T, D)."""
        return self.embedding(tokens)

    def side_inputs(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What each block gets beside the residual stream: rotary table and mask."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotary = rotary_table(positions, self.dims.head_dim, self.dims.rope_theta)
        return rotary, None if documents is None else document_mask(documents)

    def end(self, x: Tensor) -> Tensor:
        """What comes after the blocks: logits (B, T, V)."""
        return self.head(self.norm(x))

    def layout(self) -> Layout:
        """How this model can be cut."""
        dims = self.dims
        return Layout(
            column=("blocks.*.attention.query", "blocks.*.feed_forward.gate", "blocks.*.feed_forward.up"),
            grouped=("blocks.*.attention.key", "blocks.*.attention.value"),
            groups=dims.kv_heads,
            row=("blocks.*.attention.output", "blocks.*.feed_forward.down"),
            region=("blocks.*.attention", "blocks.*.feed_forward"),
            embedding="embedding",
            head="head",
            sequence_dim=1,
            attention=("blocks.*.attention",),
            inputs={"tokens": 1, "labels": 1, "positions": 1},
            positions="positions",
            blocks="blocks",
            begin=("embedding",),
            end=("norm", "head"),
            counts={
                "model.heads": dims.heads,
                "model.ffn": dims.ffn,
                "the vocabulary (model.vocab)": dims.vocab,
            },
        )

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Set one whole parameter's initial value in place; called with a generator of the parameter's own."""
        if tensor.dim() == 1:
            tensor.fill_(1.0)
            return
        # the two projections that end on the residual stream, of which there are 2 x layers, start smaller, so that
        # the stream's variance does not grow with depth (GPT-2, Radford et al. 2019)
        residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        std = 0.02 / math.sqrt(2 * self.dims.layers) if residual else 0.02
        tensor.normal_(0.0, std, generator=generator)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every position's angles: (2, [B,] T, 1, E/2), fp32 whatever the model's precision."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None] * theta**-exponent  # ([B,] T, E/2)
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(-2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn (B, T, heads, E) by its positions; pairs are (i, i + E/2), as in Hugging Face's Llama."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def document_mask(documents: Tensor) -> Tensor:
    """(B, 1, T, T), true where a token may look: back, and inside its own document."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :, None] == documents[:, None, None, :]) & causal
