"""From "hf:<path or id>" and its options to a function that builds the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from shoal.data.text import HF, import_extra
from shoal.job import Section
from shoal.models.huggingface.adapter import HuggingFace
from shoal.models.huggingface.construct import construct
from shoal.models.huggingface.weights import StoredWeights

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


class Options(Section):
    """`[model.options]` of an "hf:" family."""

    weights: bool | None = Field(
        None,
        description="read the weights beside the configuration, or draw new ones; left out: read those there are",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="entries that replace those of config.json"
    )
    lora: dict[str, Any] | None = Field(
        None,
        description="arguments of peft.LoraConfig: the weights are frozen and adapters beside them train",
    )


def builder_of(name: str, vocab: int | None = None, **options: Any) -> Callable[[], HuggingFace]:
    """A function that builds a model: without storage for its parameters, which `parallelize` fills.

    Args:
        name: a folder that holds a config.json, or an id on the hub; "hf:" before it may be left out.
        vocab: the tokenizer's vocabulary size, if it is known.
        options: `weights`, `config` and `lora` as in `[model.options]`.

    Raises:
        ValueError: there is no such model, an option is unknown, weights are wanted and not there, or the vocabulary is too
            small.

    Example:
        model = shoal.parallelize(builder_of("checkpoints/qwen"), shoal.Plan(shard=8), world, precision="bf16")
    """
    name = name.removeprefix(HF)
    transformers = import_extra("transformers", f'model.family = "hf:{name}"')
    chosen = _options(options)
    folder = folder_of(name, with_weights=chosen.weights is not False)
    config = _config(transformers, folder, chosen.config)
    stored = StoredWeights.found_in(folder) if chosen.weights is not False else None
    if chosen.weights and stored is None:
        raise ValueError(
            f"model.options.weights = true, but {folder} has no *.safetensors; save the model with save_pretrained, or leave "
            "weights out to train from new ones"
        )
    if vocab is not None and config.vocab_size < vocab:
        own = any((folder / file).exists() for file in TOKENIZERS)
        raise ValueError(
            f"the tokenizer has {vocab} tokens and hf:{name} has vocab_size = {config.vocab_size}; use "
            + (
                f'its own tokenizer (data.tokenizer="hf:{name}")'
                if own
                else f"data.vocab={config.vocab_size}"
            )
            + ("" if stored else f", or set model.options.config.vocab_size to {vocab}")
        )
    return partial(_build, config, stored, chosen.lora)


def _build(config: Any, stored: StoredWeights | None, lora: dict[str, Any] | None) -> HuggingFace:
    return HuggingFace(construct(copy.deepcopy(config), lora), stored)


def _options(options: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("model.options", *(str(part) for part in first["loc"])))
        known = ", ".join(Options.model_fields)
        raise ValueError(f"{key}: {first['msg']}; an hf: family takes {known} in [model.options]") from error


def folder_of(name: str, *, with_weights: bool) -> Path:
    """The folder of a model, downloaded (or found in the hub's cache) if `name` is no folder."""
    folder = Path(name).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    if folder.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ValueError(
            f'model.family = "hf:{name}": there is no {CONFIG} in {folder.absolute()}; give a folder that holds one, or an id '
            "on the Hugging Face hub"
        )
    hub = import_extra("huggingface_hub", f'model.family = "hf:{name}"')
    patterns = [*SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # of many kinds: no network, no such model, no permission
        raise ValueError(
            f'model.family = "hf:{name}" is no folder here, and could not be had from the hub: {type(error).__name__}: {error}'
        ) from error


def read_config(name: str, options: dict[str, Any]) -> Any:
    """A model's configuration with `options.config` in it, as transformers has it.

    Raises:
        ValueError: there is no such model, or an option is unknown.
    """
    name = name.removeprefix(HF)
    transformers = import_extra("transformers", f'model.family = "hf:{name}"')
    return _config(transformers, folder_of(name, with_weights=False), _options(options).config)


def _config(transformers: Any, folder: Path, replaced: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    unknown = [key for key in replaced if not hasattr(config, key)]
    if unknown:
        raise ValueError(
            f"model.options.config.{unknown[0]}: {type(config).__name__} of {folder} has no such entry"
        )
    return type(config).from_dict({**config.to_dict(), **replaced})
