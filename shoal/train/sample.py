"""Text from a run's last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn

from shoal.checkpoint.folder import Checkpoint, list_checkpoints
from shoal.checkpoint.store import load, model_state
from shoal.config import Settings
from shoal.config import load as load_settings
from shoal.data.batches import open_dataset
from shoal.data.format import read_index
from shoal.models.build import builder
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.run import Run
from shoal.world import join_world


class Trained(NamedTuple):
    """A model on this machine, and what turns text into its tokens and back."""

    model: nn.Module
    tokenizer: Tokenizer
    end_of_text: int
    step: int
    seq_len: int


def open_run(path: Path) -> Trained:
    """The model of a run's newest complete checkpoint, on one device.

    Raises:
        ValueError: no such run, no checkpoint in it, or its data is not text.
    """
    settings, checkpoint = last_checkpoint(path)
    folder = Path(settings.run.data) if settings.run.data else None
    datasets = open_dataset(settings.data, settings.train.seed, folder)
    if datasets.tokenizer is None:
        raise ValueError(f"{str(path)!r} was not trained on text, so there is nothing to write")
    with join_world(rank=0, size=1) as here:
        model = parallelize(builder(settings.model, datasets.vocab), Plan(compile=False), here)
        load(checkpoint, model_state(model), here)
    end_of_text = read_index(datasets.tokenizer.parent).end_of_text
    tokenizer = Tokenizer.from_file(str(datasets.tokenizer))
    return Trained(model, tokenizer, end_of_text, checkpoint.step, settings.data.seq_len)


def last_checkpoint(path: Path) -> tuple[Settings, Checkpoint]:
    """The settings of a run, and its newest complete checkpoint.

    Raises:
        ValueError: no such run, or no checkpoint in it.
    """
    run = Run(path)
    if not run.job_file.exists():
        raise ValueError(f"{str(path)!r} is no run directory: there is no {run.job_file.name} in it")
    checkpoints, _ = list_checkpoints(run.checkpoints)
    if not checkpoints:
        raise ValueError(
            f"{str(path)!r} has no complete checkpoint yet (checkpoint.every sets when one is written)"
        )
    return load_settings(run.job_file), checkpoints[-1]


@torch.no_grad()
def generate(
    trained: Trained, prompt: str, count: int, *, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """At most `count` tokens that go on from a prompt, up to an end of text. The model sees its last seq_len tokens."""
    device = next(trained.model.parameters()).device
    start = trained.tokenizer.encode(prompt).ids or [trained.end_of_text]
    tokens = torch.tensor(start, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    trained.model.eval()
    for _ in range(count):
        logits = trained.model(tokens[None, -trained.seq_len :])[0, -1].float()
        token = _draw(logits, temperature, top_k, generator)
        if token.item() == trained.end_of_text:
            break
        tokens = torch.cat((tokens, token[None]))
    return trained.tokenizer.decode(tokens[len(start) :].tolist())


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax()
    best, index = logits.topk(min(top_k, len(logits)))
    choice = torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)
    return index[choice[0]]
