"""Weights in safetensors files, of which each rank reads the parts that it keeps.

Files may hold a model under older names, or the experts of a mixture one by one; transformers knows both as conversions, which
are followed here for the parts that are read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.data.text import import_extra

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Part = tuple[slice, ...]
"""Where a part lies in a whole tensor, dim by dim."""


class Recipe(NamedTuple):
    """How a parameter is made of tensors of the files."""

    keys: list[list[str]]
    """names in the files: joined along `joined`, each of one tensor or of a list that is stacked along a new first dim"""
    stacked: bool = False
    joined: int = 0


class StoredWeights:
    """The tensors of a folder, by name; opens a file only when it reads."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder = folder
        self._files = files
        self._recipes: dict[str, Recipe] = {name: Recipe([[name]]) for name in files}

    @classmethod
    def found_in(cls, folder: Path) -> StoredWeights | None:
        """The weights of a folder: one file, or many with an index; None if there are none.

        Raises:
            ValueError: the index names files that are not there.
        """
        if (folder / INDEX).is_file():
            files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            missing = sorted({file for file in files.values() if not (folder / file).is_file()})
            if missing:
                raise ValueError(
                    f"{folder / INDEX} names {len(missing)} files that are not there, such as {missing[0]}"
                )
            return cls(folder, files)
        if not (folder / SINGLE).is_file():
            return None
        with _open(folder / SINGLE) as file:
            return cls(folder, dict.fromkeys(file.keys(), SINGLE))

    def fit(self, model: nn.Module) -> None:
        """Learn under which names the files hold a transformers model's tensors.

        Raises:
            ValueError: a parameter is in no file, or needs a conversion that this version does not do.
        """
        self._recipes = _recipes(model, list(self._files))
        for names in _aliases(model).values():
            known = next((name for name in names if name in self._recipes), None)
            if known is None:
                raise ValueError(
                    f"{self.folder} has no weights for {names[0]}; its files are of another model, or model.options.config "
                    "changes what it is made of (model.options.weights = false draws new weights)"
                )
            self._recipes |= dict.fromkeys(names, self._recipes[known])

    def __contains__(self, name: str) -> bool:
        return name in self._recipes

    def read(self, name: str, part: Part, shape: torch.Size) -> Tensor:
        """A part of a parameter whose whole has `shape`; no more than it is read from the files.

        Raises:
            ValueError: the file has another shape.
        """
        recipe = self._recipes[name]
        if not recipe.stacked and len(recipe.keys) == 1:
            return self._slice(recipe.keys[0][0], part, shape)
        joined = [
            self._stacked(keys, part[0]) if recipe.stacked else self._all(keys[0]) for keys in recipe.keys
        ]
        whole = torch.cat(joined, recipe.joined) if len(joined) > 1 else joined[0]
        found = (len(recipe.keys[0]), *whole.shape[1:]) if recipe.stacked else tuple(whole.shape)
        if found != tuple(shape):
            raise ValueError(
                f"{self.folder}: {name} has shape {found}, the configuration says {tuple(shape)}"
            )
        return whole[(slice(None), *part[1:])] if recipe.stacked else whole[part]

    def _stacked(self, keys: list[str], part: slice) -> Tensor:
        chosen = keys[part]
        if not chosen:
            return self._all(keys[0])[None][:0]
        return torch.stack([self._all(key) for key in chosen])

    def _all(self, key: str) -> Tensor:
        with _open(self.folder / self._files[key]) as file:
            return file.get_tensor(key)

    def _slice(self, key: str, part: Part, shape: torch.Size) -> Tensor:
        path = self.folder / self._files[key]
        with _open(path) as file:
            stored = file.get_slice(key)
            if list(stored.get_shape()) != list(shape):
                raise ValueError(
                    f"{path}: {key} has shape {tuple(stored.get_shape())}, the configuration says {tuple(shape)}"
                )
            lengths = [len(range(*cut.indices(size))) for cut, size in zip(part, shape, strict=True)]
            if 0 in lengths:
                return torch.empty(lengths)
            return stored[part] if part else file.get_tensor(key)


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters beside it."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter was added to the model that the files hold."""
    return "lora_" in name


def _open(path: Path) -> Any:
    return import_extra("safetensors", str(path)).safe_open(str(path), framework="pt")


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter: several for a tied one."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_adapter(name):
            found.setdefault(id(parameter), []).append(plain_name(name))
    return found


def _recipes(model: Any, keys: list[str]) -> dict[str, Recipe]:
    """From names of a model to what the files have for them, by transformers' own conversions."""
    conversion = import_extra("transformers.conversion_mapping", "reading weights")
    loading = import_extra("transformers.core_model_loading", "reading weights")
    transforms = conversion.get_model_conversion_mapping(model)
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    renamings = [entry for entry in transforms if not isinstance(entry, loading.WeightConverter)]
    names = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    found: dict[str, Recipe] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for key in sorted(keys, key=_natural):
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if pattern is None:
            found[name] = Recipe([[key]])
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(key)
    for name, by_pattern in parts.items():
        pattern = next(iter(by_pattern))
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        found[name] = _joined(name, converter, by_pattern)
    return found


def _joined(name: str, converter: Any, by_pattern: dict[str, list[str]]) -> Recipe:
    operations = {type(operation).__name__: operation for operation in converter.operations}
    if set(operations) - {"MergeModulelist", "Concatenate"} or len(converter.target_patterns) > 1:
        raise ValueError(
            f"{name} is stored in a form that transformers converts by {', '.join(operations)}, which this version does not do "
            "by part; load the model with transformers and save it with save_pretrained(..., save_original_format=False)"
        )
    keys = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
    merge, join = operations.get("MergeModulelist"), operations.get("Concatenate")
    return Recipe(keys, stacked=merge is not None, joined=join.dim if join is not None else 0)


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts experts.10 after experts.9."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"\.", key)]
