"""A run's last checkpoint as a folder that transformers reads."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.checkpoint.huggingface import GENERATION, export_huggingface
from shoal.checkpoint.store import load, model_state
from shoal.data.batches import open_dataset
from shoal.data.format import read_index
from shoal.data.text import HF
from shoal.job import Model
from shoal.models.build import builder
from shoal.parallel.apply import parallelize
from shoal.plan import Plan
from shoal.train.sample import last_checkpoint
from shoal.world import join_world


def export_run(path: Path, out: Path, dtype: torch.dtype | None = None) -> int:
    """Write the model and tokenizer of a run's newest complete checkpoint into `out`; returns the checkpoint's step.

    Raises:
        ValueError: no such run, no checkpoint in it, its model has no form in transformers, or `out` holds something else.
    """
    settings, checkpoint = last_checkpoint(path)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").exists())):
        raise ValueError(f"{str(out)!r} is there and holds no model; choose another folder")
    folder = Path(settings.run.data) if settings.run.data else None
    datasets = open_dataset(settings.data, settings.train.seed, folder)
    end_of_text = read_index(datasets.tokenizer.parent).end_of_text if datasets.tokenizer else None
    with join_world(rank=0, size=1, device="cpu") as here:
        model = parallelize(
            builder(settings.model, datasets.vocab),
            Plan(compile=False),
            here,
            precision=settings.train.precision,
        )
        load(checkpoint, model_state(model), here)
        export_huggingface(
            model,
            out,
            dtype=dtype,
            tokenizer=datasets.tokenizer,
            end_of_text=end_of_text,
            begun_with=settings.data.tokenizer.removeprefix(HF)
            if settings.data.tokenizer.startswith(HF)
            else None,
            generation=_generation(settings.model),
            positions=settings.data.seq_len,
        )
    return checkpoint.step


def _generation(model: Model) -> Path | None:
    """What the folder of a model of transformers says of generating texts, if it says something."""
    if not model.family.startswith(HF):
        return None
    from shoal.models.huggingface.source import folder_of

    path = folder_of(model.family.removeprefix(HF), with_weights=False) / GENERATION
    return path if path.is_file() else None
