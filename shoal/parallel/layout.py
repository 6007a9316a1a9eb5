"""Finding what a model's layout names."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from shoal.layout import Layout
from shoal.plan import Plan


def layout_of(model: nn.Module, plan: Plan) -> Layout | None:
    """The layout that a model offers for a plan, if it does."""
    offered: Any = getattr(model, "layout", None)
    found = offered
    if callable(offered):
        found = offered(plan) if inspect.signature(offered).parameters else offered()
    if found is not None and not isinstance(found, Layout):
        raise TypeError(
            f"{type(model).__name__}.layout gives {type(found).__name__}; expected a shoal.Layout"
        )
    return found


def modules_named(model: nn.Module, patterns: tuple[str, ...] | str | None) -> dict[str, nn.Module]:
    """Modules whose dotted names fit, in the model's order.

    Raises:
        ValueError: a pattern fits none.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for pattern in (patterns,) if isinstance(patterns, str) else patterns or ():
        fits = re.compile("[^.]+".join(re.escape(piece) for piece in pattern.split("*")))
        matched = {name: module for name, module in named.items() if fits.fullmatch(name)}
        if not matched:
            raise ValueError(f"layout: no module of {type(model).__name__} is named {pattern!r}")
        found |= matched
    return found
