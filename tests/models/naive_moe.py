"""The mixture of experts as its definition reads: token by token, expert by expert, with nothing sorted or stacked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.moe import MixtureOfExperts


def naive_scores(layer: MixtureOfExperts, token: Tensor) -> Tensor:
    logits = layer.router.weight @ token
    return torch.softmax(logits, 0) if layer.router.scoring == "softmax" else torch.sigmoid(logits)


def naive_choice(layer: MixtureOfExperts, token: Tensor) -> list[int]:
    """The experts of a token: those with the largest score and bias together."""
    biased = (naive_scores(layer, token) + layer.router.bias).tolist()
    return sorted(range(len(biased)), key=lambda expert: -biased[expert])[: layer.router.top_k]


def naive_moe(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, list[int]]:
    """The layer's output for (B, T, D), and how many tokens each expert got."""
    outputs, counts = [], [0] * len(layer.router.weight)
    for token in x.flatten(0, 1):
        scores, chosen = naive_scores(layer, token), naive_choice(layer, token)
        total = sum(scores[expert] for expert in chosen) if len(chosen) > 1 else 1.0
        output = torch.zeros_like(token)
        for expert in chosen:
            counts[expert] += 1
            gate, up, down = (
                weight[expert] for weight in (layer.experts.gate, layer.experts.up, layer.experts.down)
            )
            output = output + scores[expert] / total * (down @ (F.silu(gate @ token) * (up @ token)))
        if layer.shared is not None:
            output = output + layer.shared(token)
        outputs.append(output)
    return torch.stack(outputs).view_as(x), counts
