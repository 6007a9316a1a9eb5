"""`watched`: which module's output, or output's gradient, is the first that is not finite, seen by hooks around modules.

Modules inside of what is compiled are not seen: a graph does not call them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.parallel.replicate import core
from shoal.tensors import tensors_in
from shoal.train.optimizer import local
from shoal.train.step import Step


class Sight(NamedTuple):
    """The first thing that was seen not to be finite."""

    micro_batch: int
    module: str
    text: str
    backward: bool
    inherited: bool
    """what came in was not finite already, and another rank may have made it"""


class Look(NamedTuple):
    """One look at a module: flags on the device."""

    micro_batch: int
    module: str
    came: Tensor | None
    """all that came in is finite; None for nothing, or in backward"""
    went: Tensor
    backward: bool


class Watch:
    """Looks in the order of execution."""

    def __init__(self) -> None:
        self.micro_batch = 0
        self._looks: list[Look] = []
        self._seen: set[tuple[int, str]] = set()

    def begin(self, index: int) -> None:
        """A micro-batch begins."""
        self.micro_batch = index

    def forward(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module has run. A second run of it, as for recompute, is none of interest."""
        key = (self.micro_batch, name)
        if _in_backward() or key in self._seen:
            return
        self._seen.add(key)
        outputs = tensors_in(output)
        if (went := all_finite(outputs)) is None:
            return
        self._looks.append(Look(self.micro_batch, name, all_finite(tensors_in([args, kwargs])), went, False))
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._backward, *key))

    def _backward(self, micro_batch: int, name: str, gradient: Tensor) -> None:
        if (went := all_finite([gradient])) is not None:
            self._looks.append(Look(micro_batch, name, None, went, True))

    def first(self) -> Sight | None:
        """The first in forward, or if all of that is finite, in backward; waits for the device."""
        went = read_flags([look.went for look in self._looks])
        bad = [look for look, fine in zip(self._looks, went, strict=True) if not fine]
        look = next((look for look in bad if not look.backward), bad[0] if bad else None)
        if look is None:
            return None
        name = look.module or "the model"
        if look.backward:
            text = f"the first gradient that is not finite is that of the output of {name}; all outputs are finite"
            return Sight(look.micro_batch, look.module, text, backward=True, inherited=False)
        inherited = look.came is not None and not bool(look.came)
        text = f"the first output that is not finite is that of {name}"
        return Sight(
            look.micro_batch, look.module, text + ", and so is its input" * inherited, False, inherited
        )


@contextmanager
def watched(step: Step) -> Generator[Watch]:
    """Watch the modules of a step's model while it runs."""
    watch = Watch()
    handles = [
        module.register_forward_hook(partial(watch.forward, name), with_kwargs=True)
        for name, module in visible(core(step.model), step.plan.compiles(step.world.device.type))
    ]
    before, step.on_micro_batch = step.on_micro_batch, watch.begin
    try:
        yield watch
    finally:
        step.on_micro_batch = before
        for handle in handles:
            handle.remove()


def visible(model: nn.Module, compiled: Literal["blocks", "model"] | None) -> list[tuple[str, nn.Module]]:
    """The modules that Python calls, by name: none inside of what is compiled."""
    if compiled == "model":
        return [("", model)]
    # blocks that are compiled have a forward of their own
    graphs = [f"{name}." for name, module in model.named_modules() if name and "forward" in vars(module)]
    hidden = tuple(graphs) if compiled else ()
    return [(name, module) for name, module in model.named_modules() if not name.startswith(hidden)]


def first_bad(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name of a tensor in which something is not finite; waits for the device."""
    flags = [(name, flag) for name, tensor in named if (flag := all_finite([tensor])) is not None]
    fine = read_flags([flag for _, flag in flags])
    return next((name for (name, _), good in zip(flags, fine, strict=True) if not good), None)


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor | None:
    """Whether all elements of this rank's parts are finite, as a flag on the device; None if there are none that could not be."""
    parts = [local(tensor) for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # a norm needs no memory for a flag an element, and of their largest it cannot overflow
    flags = [torch.linalg.vector_norm(part, math.inf).isfinite() for part in parts if part.numel()]
    return torch.stack(flags).all() if flags else None


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """Their values; one wait for the device."""
    return torch.stack(list(flags)).tolist() if flags else []


def _in_backward() -> bool:
    """Whether a backward runs in this thread. Private to torch, whose own checkpointing asks so: nothing public tells."""
    return torch._C._current_graph_task_id() != -1
