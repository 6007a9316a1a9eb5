"""Every collective of a rank is seen before it is made: noted where others can read it, and if asked for compared with theirs.

All ways to a collective (torch.distributed, functional collectives, FSDP, DDP's C++, compiled blocks) end in operators of torch's
`c10d` library. Noting is a kernel of ours before theirs, so that none of them has to know of it, on Gloo and NCCL alike.

[Note: the dispatch key] `BackendSelect` is part of every call, also below autograd and inside compiled code, comes right before
the device's own kernels, and is unused by collectives. What is called there calls on with the keys after it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.observe.calls import Call, CallFile, Group
from shoal.observe.verdict import Place, mismatch_text, name_of, sure_mismatch
from shoal.run import Run
from shoal.world import DeadlineError, World
from shoal.world.meeting import ranks_text

TORCH = str(Path(torch.__file__).parent)
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
SLOWEST_POLL_S = 0.01


class MismatchError(RuntimeError):
    """Ranks of a group came to one collective with different calls."""


class Form(NamedTuple):
    """What of a `c10d` operator's arguments must be equal on all ranks: their places among them."""

    name: str
    group: int
    tensors: int | None = None
    reduction: int | None = None
    root: int | None = None
    sized: bool = True
    """false: sizes may differ"""


FORMS = {
    "allreduce_": Form("all_reduce", 1, tensors=0, reduction=2),
    "allreduce_coalesced_": Form("all_reduce", 1, tensors=0, reduction=2),
    "broadcast_": Form("broadcast", 1, tensors=0, root=2),
    "reduce_": Form("reduce", 1, tensors=0, reduction=2, root=3),
    "allgather_": Form("all_gather", 2, tensors=1),
    "allgather_coalesced_": Form("all_gather", 2, tensors=1),
    "_allgather_base_": Form("all_gather", 2, tensors=1),
    "allgather_into_tensor_coalesced_": Form("all_gather", 2, tensors=1),
    "reduce_scatter_": Form("reduce_scatter", 2, tensors=0, reduction=3),
    "_reduce_scatter_base_": Form("reduce_scatter", 2, tensors=0, reduction=3),
    "reduce_scatter_tensor_coalesced_": Form("reduce_scatter", 2, tensors=0, reduction=3),
    "gather_": Form("gather", 2, tensors=1, root=3),
    "scatter_": Form("scatter", 2, tensors=0, root=3),
    "alltoall_": Form("all_to_all", 2, tensors=1, sized=False),
    "alltoall_base_": Form("all_to_all", 2, tensors=1, sized=False),
    "barrier": Form("barrier", 1),
    "monitored_barrier_": Form("barrier", 1),
}
TRANSFERS = {"send": True, "recv_": False}
"""whether this rank is the source; both sides note a transfer under one name"""


@contextmanager
def seen(file: CallFile, world: World, *, compared: bool) -> Iterator[None]:
    """While it lasts, every collective of this process is noted in `file` before it is made.

    With `compared` all ranks of a group tell each other what they are about to call, over the store and before data moves.

    Raises:
        MismatchError: with `compared`, on all ranks of a group, naming calls and lines of both sides. DeadlineError: naming the
            ranks that did not come.
    """
    comparer = Comparer(world) if compared else None

    def see(group: Group, text: str, *, all_come: bool = True) -> None:
        call = file.add(group, text, _line())
        if comparer is not None and all_come and len(group.ranks) > 1:
            comparer.compare(group, call)

    world.calls, world.compares_calls = file, compared
    library = torch.library.Library("c10d", "IMPL")
    groups: dict[str, Group] = {}
    try:
        for name, form in FORMS.items():
            intercept(
                library,
                name,
                lambda args, form=form: see(_group(args[form.group], groups), _text(form, args)),
            )
        for name, sends in TRANSFERS.items():
            intercept(
                library, name, lambda args, sends=sends: see(*_transfer(args, sends, groups), all_come=False)
            )
        yield
    finally:
        world.calls, world.compares_calls = None, False
        library._destroy()  # there is no public way to take a kernel back before the library object is collected


def require_same_calls(run: Run, world: World) -> None:
    """Have rank 0 look, before state is kept, whether ranks whose files it can read made the same calls until now.

    Raises:
        MismatchError: on rank 0; others wait for it at their next collective.
    """
    if world.is_main and world.size > 1 and (found := sure_mismatch(run.ranks, range(world.size))):
        raise MismatchError(found.text)


class Comparer:
    """What ranks are about to call, compared over the store."""

    def __init__(self, world: World) -> None:
        self._store, self._rank = world.store("calls"), world.rank
        self._deadline_s = world.deadline.total_seconds()

    def compare(self, group: Group, call: Call) -> None:
        """Return when all ranks of the group are about to make the same call.

        Raises:
            MismatchError, DeadlineError: on all of them.
        """
        keys = [f"{group.name}/{call.number}/{rank}" for rank in group.ranks]
        self._store.set(f"{group.name}/{call.number}/{self._rank}", f"{call.text}\n{call.line}")
        self._wait(keys, group, call)
        said = [value.decode().partition("\n") for value in self._store.multi_get(keys)]
        if call.number > 1:  # all have come to this call, so all have read what was said of the one before
            self._store.delete_key(f"{group.name}/{call.number - 1}/{self._rank}")
        if any(text != call.text for text, _, _ in said):
            places = [
                Place(rank, text, line) for rank, (text, _, line) in zip(group.ranks, said, strict=True)
            ]
            raise MismatchError(mismatch_text(group, call.number, places))

    def _wait(self, keys: list[str], group: Group, call: Call) -> None:
        began, pause = time.monotonic(), 0.0001
        while not self._store.check(keys):
            if time.monotonic() - began > self._deadline_s:
                missing = [
                    r for r, key in zip(group.ranks, keys, strict=True) if not self._store.check([key])
                ]
                raise DeadlineError(
                    f"rank {self._rank} waited {self._deadline_s:g} s at {call.line} for {ranks_text(missing)} to come to "
                    f"{call.text}, call {call.number} of {name_of(group)}"
                )
            time.sleep(pause)
            pause = min(SLOWEST_POLL_S, pause * 1.5)


def intercept(library: torch.library.Library, name: str, look: Callable[[Sequence[Any]], None]) -> None:
    """Have `look` see the arguments of every call of the `c10d` operator `name`, until the library is destroyed."""
    operator = getattr(torch.ops.c10d, name).default
    after = torch._C._dispatch_keyset_full_after(
        torch._C.DispatchKey.BackendSelect
    )  # torch.library offers no name for it

    def kernel(keys: Any, *args: Any) -> Any:
        look(args)
        return operator.redispatch(keys & after, *args)

    library.impl(name, kernel, "BackendSelect", with_keyset=True)


def _group(boxed: Any, groups: dict[str, Group]) -> Group:
    group = dist.ProcessGroup.unbox(boxed)
    name = group.group_name
    if name not in groups:
        kind = group.group_desc
        kind = kind.removeprefix("mesh_") if kind.startswith("mesh_") else ""
        groups[name] = Group(name, kind, _ranks(group))
    return groups[name]


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Of a group that torch knows of; of one that a library made aside none, and its calls are not compared."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()


def _text(form: Form, args: Sequence[Any]) -> str:
    """Operation, reduction, root, type and shapes: `all_reduce sum float32 (1024, 512)`."""
    words = [form.name]
    if form.reduction is not None:
        words.append(_reduction(args[form.reduction]))
    if form.root is not None:
        words.append(f"root {args[form.root]}")
    if form.tensors is not None:
        words += _shapes(args[form.tensors], form.sized)
    return " ".join(words)


def _reduction(boxed: Any) -> str:
    number = boxed._get_method("op")()  # as boxed.op(), in a third of the time
    return REDUCTIONS[number] if number < len(REDUCTIONS) else f"reduction {number}"


def _shapes(tensors: Any, sized: bool) -> list[str]:
    """Type and shapes of a tensor, or of the first few of a list."""
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    while tensors and not isinstance(tensors[0], Tensor):
        tensors = tensors[0]
    if not tensors:
        return []
    said = [str(tensors[0].dtype).removeprefix("torch.")]
    if sized:
        said += [str(tuple(tensor.shape)) for tensor in tensors[:3]]
    if len(tensors) <= 3:
        return said
    rest = f" of {sum(map(Tensor.numel, tensors[3:]))} elements" if sized else ""
    return [*said, f"and {len(tensors) - 3} more{rest}"]


def _transfer(args: Sequence[Any], sends: bool, groups: dict[str, Group]) -> tuple[Group, str]:
    """A send and its receive are calls of a group of two."""
    tensors, boxed, other = args[:3]
    group = _group(boxed, groups)
    if not group.ranks:
        return group, "transfer"
    here, there = group.ranks[dist.ProcessGroup.unbox(boxed).rank()], group.ranks[other]
    source, target = (here, there) if sends else (there, here)
    pair = f"{group.name}/{source}>{target}"
    if pair not in groups:
        groups[pair] = Group(pair, group.kind, (source, target))
    # torch's pipelines (2.11) greet the next rank with a number, which it takes as a tensor of one element
    said = ["(1,)" if word == "()" else word for word in _shapes(tensors, sized=True)]
    return groups[pair], " ".join([f"transfer {source} to {target}", *said])


def _line() -> str:
    """`file:line in function` of what called the collective: the innermost frame outside of torch and this file."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


@lru_cache(4096)
def _is_inside(file: str) -> bool:
    return file.startswith(TORCH) or file == __file__
