"""Building a transformers model whose parameters have no storage and whose buffers are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.data.text import import_extra
from shoal.models.huggingface.attention import NAME, attention, layers_it_knows


def construct(config: Any, lora: dict[str, Any] | None) -> nn.Module:
    """The model of a configuration, with LoRA adapters if they are asked for; its weights are still to come."""
    transformers = import_extra("transformers", "an hf: family")
    transformers.AttentionInterface.register(NAME, attention)
    with parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=_attention_for(transformers, config), dtype=torch.float32
        )
        if lora is not None:
            _add_lora(model, lora)
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While it lasts, modules are built with parameters on the meta device and buffers on the CPU.

    Buffers (rotary frequencies) are computed in constructors and are in no file of weights: built on the meta device they would
    be lost. A parameter is replaced as it is registered, before it is initialised, so that its memory is never touched.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = original


def _attention_for(transformers: Any, config: Any) -> str:
    """Ours where a model lets its attention be replaced, else torch's through transformers, else the model's own."""
    kind = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise ValueError(
            f"{type(config).__name__} describes no causal language model that this transformers {transformers.__version__} has"
        )
    if isinstance(kind, tuple):
        kind = kind[0]
    if getattr(kind, "_supports_attention_backend", False) and layers_it_knows(config):
        return NAME
    return "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"


def _add_lora(model: nn.Module, arguments: dict[str, Any]) -> None:
    peft = import_extra("peft", "model.options.lora")
    try:
        settings = peft.LoraConfig(**arguments)
        peft.inject_adapter_in_model(settings, model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.options.lora = {arguments}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name and ".lora_A." not in name and ".lora_B." not in name:
            raise ValueError(
                f"model.options.lora = {arguments} makes {name}, which has no rule for its first value; use plain LoRA on linears"
            )
