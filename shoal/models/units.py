"""The units of a model: its repeated blocks, and which of them must stay together because they share a parameter.

Sharding, recompute and compile all work unit by unit; what is in no unit is the root's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class Unit(NamedTuple):
    """A repeated block and its dotted name in the model."""

    name: str
    module: nn.Module


def find_units(model: nn.Module) -> list[Unit]:
    """The repeated blocks: children of the outermost containers that hold two or more of one class.

    Example:
        >>> [unit.name for unit in find_units(nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2) for _ in "ab")}))]
        ['blocks.0', 'blocks.1']
    """
    seen: set[nn.Module] = set()  # a stack that the model holds under two names is one
    return [unit for unit in _units("", model) if unit.module not in seen and not seen.add(unit.module)]


def _units(prefix: str, module: nn.Module) -> Iterator[Unit]:
    for name, child in module.named_children():  # each once, whatever names it has here
        path = f"{prefix}{name}"
        repeated = _repeated(child)
        if repeated:
            yield from (Unit(f"{path}.{key}", block) for key, block in repeated)
        else:
            yield from _units(f"{path}.", child)


def _repeated(container: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children of a container if they are repeated blocks, else nothing."""
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    children = [
        (name, child)
        for name, child in container.named_children()
        if any(True for _ in child.parameters())
        and not isinstance(child, nn.ModuleList | nn.ModuleDict)  # never called
    ]
    kinds = [type(child) for _, child in children]
    most = max(kinds, key=kinds.count, default=None)
    blocks = [(name, child) for name, child in children if type(child) is most]
    return blocks if len(blocks) >= 2 else []


def group_by_shared_parameters(model: nn.Module, units: list[Unit]) -> list[list[Unit]]:
    """Units in groups that share no parameter with each other; units that share with the root are left to it."""
    in_units = {id(module) for unit in units for module in unit.module.modules()}
    root = {
        id(parameter)
        for module in model.modules()
        if id(module) not in in_units
        for parameter in module.parameters(recurse=False)
    }
    groups: list[tuple[set[int], list[Unit]]] = []
    for unit in units:
        owned = {id(parameter) for parameter in unit.module.parameters()}
        if owned & root:
            continue
        joined = [group for group in groups if group[0] & owned]
        members = [member for group in joined for member in group[1]] + [unit]
        groups = [group for group in groups if not group[0] & owned]
        groups.append((owned.union(*(group[0] for group in joined)), members))
    return [members for _, members in groups]
