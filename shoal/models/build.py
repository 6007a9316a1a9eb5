"""From a job's model table to a function that builds the model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from shoal.data.text import HF
from shoal.imports import call_object
from shoal.job import Model
from shoal.models.llama import Llama
from shoal.models.moe import Moe
from shoal.models.moe_presets import resolve_moe
from shoal.models.presets import resolve


def builder(model: Model, vocab: int | None) -> Callable[[], nn.Module]:
    """A function without arguments that builds the job's model on the current default device.

    Args:
        vocab: the tokenizer's vocabulary size, if the data has one.

    Raises:
        ValueError: dimensions that cannot be, or an import path or a Hugging Face name that leads nowhere.
    """
    if model.family == "llama":
        dims = resolve(model, vocab)
        return lambda: Llama(dims)
    if model.family == "moe":
        moe_dims = resolve_moe(model, vocab)
        return lambda: Moe(moe_dims)
    if model.family.startswith(HF):
        from shoal.models.huggingface import builder_of

        return builder_of(model.family, vocab, **model.options)
    return lambda: call_object(model.family, model.options, "model.options")
