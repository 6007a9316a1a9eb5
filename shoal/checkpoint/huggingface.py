"""A model as a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads: safetensors, config.json, tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.data.text import import_extra
from shoal.models.huggingface.adapter import HuggingFace
from shoal.models.huggingface.weights import INDEX, SINGLE, is_adapter, plain_name
from shoal.models.llama import Llama
from shoal.parallel.replicate import core
from shoal.parallel.shard import reshard
from shoal.parallel.spread import spread_of
from shoal.run import write_whole

SHARD_BYTES = 5 * 2**30
GENERATION = "generation_config.json"

_LLAMA_NAMES = (  # ours, and what transformers' Llama calls it
    (r"^embedding\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^blocks\.", "model.layers."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.feed_forward_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.(gate|up|down)\.", r".mlp.\1_proj."),
)


def export_huggingface(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    end_of_text: int | None = None,
    begun_with: str | None = None,
    generation: Path | None = None,
    positions: int = 2048,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model, spread or not, into a folder that transformers reads. Collective for spread models; rank 0 writes.

    A model of Shoal's Llama family becomes a `LlamaForCausalLM`. LoRA adapters are added into the weights that they adapt.
    No more than `shard_bytes` and one parameter are held at a time.

    Args:
        dtype: of the weights; left out: the type in which they were trained.
        tokenizer: a tokenizer.json to go with it, whose token `end_of_text` ends a text.
        begun_with: the folder or name of a tokenizer of transformers that it is, of which more goes along, such as a template of
            chats. Left out, the tokenizer is another one than the model's configuration speaks of.
        generation: a generation_config.json of the model, to go along.
        positions: the longest sequence, for a model whose configuration does not say it.

    Raises:
        ValueError: the model is of neither kind, or its blocks are on several ranks (a pipeline).
    """
    if spread_of(model).pipeline is not None:
        raise ValueError(
            "export_huggingface writes whole models, and this one's blocks are on several ranks; export its checkpoint: "
            "shoal export RUN OUT"
        )
    inner = core(model)
    if not isinstance(inner, HuggingFace | Llama):
        raise ValueError(
            f"{type(inner).__name__} has no form in transformers; models of families llama and hf:... can be exported"
        )
    reshard(model)
    writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    kind = dtype or next(p.dtype for p in inner.parameters() if p.is_floating_point())
    _write_weights(_tensors(inner, dtype), folder, shard_bytes, writes=writes)
    if writes:
        own = begun_with is not None or end_of_text is None
        _write_config(
            inner, folder, kind, positions, None if own and isinstance(inner, HuggingFace) else end_of_text
        )
        if tokenizer is not None and not (begun_with and _copy_tokenizer(begun_with, folder)):
            _write_tokenizer(tokenizer, folder, end_of_text)
        if generation is not None and own:
            write_whole(folder / GENERATION, generation.read_text(encoding="utf-8"))
    return folder


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under their names in transformers, one after the other. Collective."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        whole = _whole(parameter)
        if ".base_layer." in name and name.endswith(".weight"):
            whole = whole + _added(model.get_submodule(name.rpartition(".base_layer.")[0]))
        yield _exported_name(model, plain_name(name)), _as(whole, dtype)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", _as(buffer.detach(), dtype)


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return tensor.cpu().contiguous()


def _added(adapted: Any) -> Tensor:
    """What the adapters of a linear add to its weight."""
    added = [
        scale * (_whole(adapted.lora_B[name].weight) @ _whole(adapted.lora_A[name].weight))
        for name, scale in adapted.scaling.items()
    ]
    total = torch.stack(added).sum(0)
    return total.T if getattr(adapted, "fan_in_fan_out", False) else total


def _exported_name(model: nn.Module, name: str) -> str:
    if isinstance(model, Llama):
        for ours, theirs in _LLAMA_NAMES:
            name = re.sub(ours, theirs, name)
    return name


def _write_weights(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, shard_bytes: int, *, writes: bool
) -> None:
    save: Any = import_extra("safetensors.torch", "an export").save_file
    held: dict[str, Tensor] = {}
    size, total, shards = 0, 0, []

    def write() -> None:
        path = folder / f".{len(shards)}.safetensors"
        save(held, str(path), metadata={"format": "pt"})
        shards.append((path, list(held)))

    for name, tensor in tensors:
        if not writes:
            continue
        amount = tensor.numel() * tensor.element_size()
        if held and size + amount > shard_bytes:
            write()
            held, size = {}, 0
        held[name] = tensor
        size, total = size + amount, total + amount
    if writes:
        write()
        _name_shards(shards, total, folder)


def _name_shards(shards: list[tuple[Path, list[str]]], total: int, folder: Path) -> None:
    """Give files their final names, which say how many there are, and write their index."""
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX):
        stale.unlink(missing_ok=True)
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return
    names: dict[str, str] = {}
    for number, (path, keys) in enumerate(shards, 1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / final)
        names |= dict.fromkeys(keys, final)
    write_whole(
        folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1)
    )


def _write_config(
    model: HuggingFace | Llama, folder: Path, dtype: torch.dtype, positions: int, end_of_text: int | None
) -> None:
    kind = str(dtype).removeprefix("torch.")
    if isinstance(model, Llama):
        write_whole(
            folder / "config.json", json.dumps(_llama_config(model, kind, positions, end_of_text), indent=1)
        )
        return
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures, config.dtype = [type(model.inner).__name__], kind
    if end_of_text is not None:  # what it says of the tokens of another tokenizer is not so here
        config.bos_token_id = config.eos_token_id = end_of_text
        config.pad_token_id = None
    config.save_pretrained(folder)


def _llama_config(model: Llama, dtype: str, positions: int, end_of_text: int | None) -> dict[str, Any]:
    dims = model.dims
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dims.dim,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": dims.norm_eps,
        "rope_theta": dims.rope_theta,
        "tie_word_embeddings": dims.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
    }


def _copy_tokenizer(begun_with: str, folder: Path) -> bool:
    """Write all of a tokenizer of transformers; false if it is a file that transformers does not read by itself."""
    if Path(begun_with).is_file():
        return False
    library = import_extra("transformers", "an export")
    library.AutoTokenizer.from_pretrained(begun_with).save_pretrained(folder)
    return True


def _write_tokenizer(file: Path, folder: Path, end_of_text: int | None) -> None:
    from tokenizers import Tokenizer

    write_whole(folder / "tokenizer.json", file.read_text(encoding="utf-8"))
    end = None if end_of_text is None else Tokenizer.from_file(str(file)).id_to_token(end_of_text)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_whole(
        folder / "tokenizer_config.json", json.dumps(settings | ({"eos_token": end} if end else {}), indent=1)
    )
