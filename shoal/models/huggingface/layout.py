"""How a transformers model can be cut: from its own hints for tensor parallelism, and from its structure.

Hints ("colwise", "rowwise" by module) say which linears may be cut by outputs and inputs. A module between whose entry and exit
both kinds lie, and nothing else that mixes features, is a region. What hints do not allow stays whole on every rank of the tensor
axis.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, NamedTuple

from torch import nn

from shoal.layout import Layout
from shoal.models.huggingface.experts import CALL, mixtures
from shoal.models.units import find_units
from shoal.plan import Plan

WHOLE_STYLES = {"replicated_with_grad_allreduce", "replicate", "sequence_parallel"}
"""hints for what stays whole inside a region, which tensor parallelism here does by itself"""


class Structure(NamedTuple):
    """What there is in a model."""

    container: str | None
    """path of the list of blocks; None if there is not one list"""
    blocks: list[nn.Module]
    attributes: list[dict[str, Any]]
    """of each block: what is not a module, parameter or method"""
    attention: dict[str, nn.Module]
    embedding: str
    head: str

    @classmethod
    def of(cls, model: Any) -> Structure:
        units = find_units(model)
        containers = {unit.name.rpartition(".")[0] for unit in units}
        ignored = {*nn.Module().__dict__, "forward"}
        paths = {id(module): name for name, module in model.named_modules()}
        head = model.get_output_embeddings()
        return cls(
            containers.pop() if len(containers) == 1 else None,
            [unit.module for unit in units],
            [{k: v for k, v in vars(unit.module).items() if k not in ignored} for unit in units],
            {
                name: module
                for name, module in model.named_modules()
                if getattr(module, "is_causal", False) is True
            },
            paths[id(model.get_input_embeddings())],
            "" if head is None else paths[id(head)],
        )


class Region(NamedTuple):
    """A module whose linears can be cut."""

    path: str
    column: list[str]
    row: list[str]


def layout_for(model: Any, structure: Structure, plan: Plan, *, ours: bool) -> Layout:
    """The layout of a model under a plan.

    Args:
        ours: attention goes through `shoal.models.huggingface.attention`.
    """
    regions = [region for region in _regions(model) if _is_divided(model, region)]
    vocabulary = _cuts_vocabulary(model, structure, plan)
    sequence = vocabulary and ours and _is_plain_outside(model, structure, regions)
    grouped = _grouped(model, structure, regions)
    config = model.config
    return Layout(
        column=tuple(name for region in regions for name in region.column if name not in grouped),
        row=tuple(name for region in regions for name in region.row),
        grouped=tuple(grouped),
        groups=getattr(config, "num_key_value_heads", None) or 1,
        region=tuple(region.path for region in regions),
        embedding=structure.embedding if vocabulary else None,
        head=structure.head if vocabulary else None,
        sequence_dim=1 if sequence else None,
        attention=tuple(structure.attention),
        experts=tuple(mixtures(model)),
        experts_call=CALL,
        inputs={"tokens": 1, "labels": 1, "positions": 1},
        positions="positions",
        blocks=structure.container,
        begin=(structure.embedding,),
        end=(*_after_blocks(model, structure), structure.head),
        counts=_counts(model, structure, regions),
        refused={
            axis: why
            for axis, why in (
                ("tensor", _against_tensor(model, regions, sequence=sequence)),
                ("context", _against_context(model, structure, ours=ours)),
                ("pipeline", _against_pipeline(model, structure)),
            )
            if why
        },
    )


def _regions(model: Any) -> list[Region]:
    """Modules whose hints are of the kinds that tensor parallelism does, each with at least one column and one row."""
    hints: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    named = dict(model.named_modules())
    by_parent: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for pattern, style in hints.items():
        fits = re.compile("[^.]+".join(re.escape(piece) for piece in pattern.split("*")))
        for name in named:
            if fits.fullmatch(name):
                by_parent[name.rpartition(".")[0]][style].append(name)
    found = []
    for path, styles in by_parent.items():
        column, row = styles.get("colwise", []), styles.get("rowwise", [])
        others = set(styles) - {"colwise", "rowwise"} - WHOLE_STYLES
        linears = all(isinstance(named[name], nn.Linear) for name in (*column, *row))
        if path and column and row and not others and linears:
            found.append(Region(path, column, row))
    return found


def _is_divided(model: Any, region: Region) -> bool:
    """Whether every matrix of a region is a column or a row: others would see parts of features without knowing it."""
    known = {*region.column, *region.row}
    return all(
        f"{region.path}.{name}".rpartition(".")[0] in known or parameter.dim() < 2
        for name, parameter in model.get_submodule(region.path).named_parameters()
    )


def _grouped(model: Any, structure: Structure, regions: list[Region]) -> list[str]:
    """Projections to key/value heads, of which there are fewer than query heads."""
    config: Any = model.config
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups is None or groups == heads:
        return []
    found = []
    for region in regions:
        if region.path in structure.attention:
            width = model.get_submodule(region.row[0]).in_features // heads
            found += [
                name for name in region.column if model.get_submodule(name).out_features == groups * width
            ]
    return found


def _counts(model: Any, structure: Structure, regions: list[Region]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for region in regions:
        if region.path in structure.attention:
            counts["num_attention_heads"] = model.config.num_attention_heads
        else:
            width = model.get_submodule(region.row[0]).in_features
            counts[f"the width of {region.path.rpartition('.')[2]}"] = width
    return counts


def _cuts_vocabulary(model: Any, structure: Structure, plan: Plan) -> bool:
    """Whether embedding and head are plain ones whose rows the tensor degree divides."""
    if not structure.head:
        return False
    embedding, head = model.get_submodule(structure.embedding), model.get_submodule(structure.head)
    return (
        type(embedding) is nn.Embedding
        and isinstance(head, nn.Linear)
        and embedding.num_embeddings % plan.tensor == 0
        and head.out_features % plan.tensor == 0
    )


def _is_plain_outside(model: Any, structure: Structure, regions: list[Region]) -> bool:
    """Whether nothing outside of regions, embedding and head is more than a norm, so that it can have a part of the sequence."""
    inside = tuple(
        f"{path}." for path in (*(region.path for region in regions), structure.embedding, structure.head)
    )
    return all(
        parameter.dim() < 2 for name, parameter in model.named_parameters() if not name.startswith(inside)
    )


def _after_blocks(model: Any, structure: Structure) -> list[str]:
    """Modules with parameters beside the blocks and the embedding: the last norm."""
    if structure.container is None:
        return []
    backbone = structure.container.rpartition(".")[0]
    return [
        path
        for name, child in model.get_submodule(backbone).named_children()
        if (path := f"{backbone}.{name}".lstrip("."))
        not in (structure.container, structure.embedding, structure.head)
        and any(True for _ in child.parameters())
    ]


def _against_tensor(model: Any, regions: list[Region], *, sequence: bool) -> str:
    name = type(model).__name__
    if not regions:
        return (
            f"no linear of {name} can be cut: they are fused or adapted, or its configuration has no hints for it; use shard or "
            "replicate"
        )
    dropped = {
        path: module.p
        for path, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    }
    if dropped and not sequence:
        keys = {key: p for key, p in _dropouts(model.config).items() if p in dropped.values()}
        return f"{name} drops activations that all ranks hold ({next(iter(dropped))}); {_without(keys)}"
    return ""


def _against_context(model: Any, structure: Structure, *, ours: bool) -> str:
    name, config = type(model).__name__, model.config
    if not ours or not structure.attention:
        return f"the attention of {name} cannot be replaced; use shard or replicate"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"{name} attends to windows of {config.sliding_window} tokens; use shard or replicate"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{name} caps the scores of its attention; use shard or replicate"
    if dropouts := {key: p for key, p in _dropouts(config).items() if "attention" in key or "attn" in key}:
        return f"{name} has dropout {max(dropouts.values())} in its attention; {_without(dropouts)}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"the rotary positions of {name} depend on the length that a rank sees; use shard or replicate"
    return ""


def _dropouts(config: Any) -> dict[str, float]:
    """Entries of a configuration that drop something, which every family names in its own way: attn_pdrop, hidden_dropout."""
    return {
        key: value
        for key, value in config.to_dict().items()
        if "drop" in key and isinstance(value, float) and value > 0
    }


def _without(dropouts: dict[str, float]) -> str:
    """What to do about dropout."""
    words = " ".join(f"model.options.config.{key}=0.0" for key in dropouts)
    return f"use {words}, or shard or replicate" if words else "use shard or replicate"


def _against_pipeline(model: Any, structure: Structure) -> str:
    name = type(model).__name__
    if structure.container is None or len(structure.blocks) != model.config.num_hidden_layers:
        return f"{name} has no one list of blocks; use shard or replicate"
    if not structure.head:
        return f"{name} has no head; use shard or replicate"
    for path in _after_blocks(model, structure):
        module = model.get_submodule(path)
        if any(parameter.dim() > 1 for parameter in module.parameters()):
            return f"{name} has {path} beside its embedding and blocks; use shard or replicate"
    return ""
