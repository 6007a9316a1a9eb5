"""Recompute: what a block keeps for backward, and what it computes a second time instead.

Under "full" a block keeps its input alone. Under "selective" it also keeps results that cost more to compute again than to hold:
those of matrix multiplications, attention and communication, as `plan.recompute_keep` says.

[Note: where it wraps] "full" wraps a block that is compiled, cast and gathered already, so that a second run goes through all of
these again. "selective" tells operators apart, which nothing outside of a compiled function can: there it is compiled with the
block, and the compiler puts a part of the forward graph into the backward graph.

Sources: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (selective, arXiv:2205.05198).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.models.units import Unit
from shoal.plan import Kept, Plan
from shoal.quiet import quiet_compiled_recompute
from shoal.tensors import map_tensors, tensors_in

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""of a block's first run and of its second"""

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "convolution")
REDUCED = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single")


def recomputed_blocks(blocks: list[Unit], plan: Plan) -> set[nn.Module]:
    """Those of a whole model's blocks that are run again in backward."""
    return {block.module for block in blocks[:: plan.recompute_every]} if plan.recompute != "none" else set()


def recomputed(
    forward: Callable[..., Any], block: nn.Module, plan: Plan, *, compiled: bool
) -> Callable[..., Any]:
    """A block's forward that keeps for backward what the plan says.

    Args:
        compiled: what this returns is going to be compiled; the compiler changes no buffer twice.
    """
    if plan.recompute == "full" and compiled:
        return wraps(forward)(partial(checkpoint, forward, use_reentrant=False))
    if plan.recompute == "full":
        contexts = partial(_full, block)
    elif compiled:
        if type(block).__module__.startswith("shoal."):
            quiet_compiled_recompute()
        contexts = partial(_selective_compiled, plan.recompute_keep)
        contexts.cache_hash = str(plan.recompute_keep)  # pyrefly: ignore[missing-attribute] - torch's cache on disk asks for it
    else:
        once = not (plan.pipeline > 1 and plan.splits_backward)
        contexts = partial(_selective_eager, plan.recompute_keep, block, once=once)
    return wraps(forward)(partial(checkpoint, forward, use_reentrant=False, context_fn=contexts))


def kind_of(operator: Any) -> Kept | None:
    """What kind of result an operator (`torch.ops...`) has, of those that can be kept.

    Example:
        >>> kind_of(torch.ops.aten.addmm.default), kind_of(torch.ops.aten.mul.Tensor)
        ('matmul', None)
    """
    space, _, name = str(operator.name()).partition("::")
    name, _, overload = name.partition(".")
    if overload == "out":  # of compiled code, which reads the memory that it gave
        return None
    if (
        space == "_c10d_functional"
    ):  # what is gathered is larger than what it came from, and is gathered again
        return "communication" if name in REDUCED else None
    if name in MATMULS:
        return "matmul"
    return "attention" if "attention" in name else None


class Choice:
    """Which results of one run of a block are kept; asked in the order of its operators."""

    def __init__(self, keep: tuple[Kept, ...]) -> None:
        self._keep = keep
        self._matmuls = 0

    def __call__(self, operator: Any) -> bool:
        kind = kind_of(operator)
        if kind == "matmul" and "every_second_matmul" in self._keep:
            self._matmuls += 1
            return self._matmuls % 2 == 1
        return kind in self._keep


def _full(block: nn.Module) -> Contexts:
    return nullcontext(), BuffersKept(block)


def _selective_eager(keep: tuple[Kept, ...], block: nn.Module, *, once: bool) -> Contexts:
    kept: Results = {}
    return _Keep(Choice(keep), kept), BuffersKept(block, _Reuse(kept, once=once))


def _selective_compiled(keep: tuple[Kept, ...]) -> Contexts:
    choice = Choice(keep)

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if choice(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


Results = dict[tuple[Any, int], tuple[Any, list[int]]]
"""By operator and how often it ran before: what it gave, and the versions of the tensors in it."""


class _Keep(TorchDispatchMode):
    """Keeps chosen results of a block's first run.

    torch's own contexts for this need each run to have the same operators. Experts that are cut gather in either run, or before
    it, and a backward that is split in two runs a block a second and a third time.
    """

    def __init__(self, choice: Choice, kept: Results) -> None:
        super().__init__()
        self._choice, self._kept = choice, kept
        self._seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if kind_of(func):
            if self._choice(func):
                result_kept = map_tensors(result, _detached)
                self._kept[func, self._seen[func]] = result_kept, _versions(result_kept)
            self._seen[func] += 1
        return result


class _Reuse(TorchDispatchMode):
    """Gives what was kept instead of computing it.

    Args:
        once: a backward passes once, so that a result can be freed when it is given.
    """

    def __init__(self, kept: Results, *, once: bool) -> None:
        super().__init__()
        self._kept, self._once = kept, once
        self._seen: Counter[Any] = Counter()

    def __enter__(self) -> Self:
        self._seen.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kind_of(func):
            return func(*args, **(kwargs or {}))
        key = func, self._seen[func]
        found = self._kept.pop(key, None) if self._once else self._kept.get(key)
        self._seen[func] += 1
        if found is None:
            return func(*args, **(kwargs or {}))
        result, versions = found
        if _versions(result) != versions:
            raise RuntimeError(
                f"a block changes the result of {func} in place, after selective recompute kept it; leave its kind out of "
                'plan.recompute_keep, use plan.recompute = "full", or an operation that is not in place'
            )
        return map_tensors(result, _detached)


def _detached(tensor: Tensor) -> Tensor:
    """The same memory and count of changes without a graph, in which a kept result would keep itself.

    Below autograd, where operators are seen, a view gets a count of its own unless this key is let in again; torch's own
    selective recompute does the same (torch/utils/checkpoint.py).
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(result: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in(result)]


class BuffersKept:
    """Lets a second run change copies of a block's buffers: running statistics are to see each batch once.

    Entered once for each recomputation, of which a schedule that splits backward makes two.
    """

    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any] | None = None) -> None:
        self._block, self._inner = block, inner or nullcontext()
        self._held: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        self._held = [
            (module, name, buffer)
            for module in self._block.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        for module, name, buffer in self._held:
            module._buffers[name] = buffer.detach().clone()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for module, name, buffer in self._held:
            module._buffers[name] = buffer
