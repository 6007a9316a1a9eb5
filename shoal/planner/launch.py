"""`Launch`: what a step gives a device to do: kernels, collectives, and what waits for what, but not how long each takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten
Kind = Literal[
    "matmul",
    "attention",
    "move",
    "transfer",
    "collective",
    "send",
    "receive",
    "record",
    "wait",
    "sync",
    "call",
]
"""move: a kernel whose time is that of the bytes that it reads and writes; transfer: a copy between host and device; record,
wait: of a stream; sync: the host waits; call: the host calls compiled code"""


class Moment(NamedTuple):
    """Where a step is."""

    step: int
    """-1 before the first"""
    phase: str
    """"setup", "forward", "backward", "recompute" (in backward), "reduce" or "update" """
    unit: str
    """the block whose operations run; "" outside of blocks"""


class Dims(NamedTuple):
    """Sizes that decide the time of a matrix product (`batch` products of m x k by k x n)."""

    m: int
    n: int
    k: int
    batch: int = 1


class Heads(NamedTuple):
    """Sizes that decide the time of attention."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    keys: int
    width: int
    causal: bool
    backward: bool


@dataclass(slots=True, eq=False)
class Launch:
    """One of them, in the order in which the host comes to it."""

    kind: Kind
    stream: int | str
    """of the device, or the name of a communicator's own"""
    operator: str
    moment: Moment
    name: str = ""
    """of the parameter that it is about"""
    nbytes: int = 0
    """that it reads and writes; of a collective: of the whole tensor"""
    flops: int = 0
    dtype: str = ""
    dims: Dims | Heads | None = None
    ranks: tuple[int, ...] = ()
    """among which a collective is; of a message: the other rank"""
    compiled: bool = False
    """launched by compiled code"""
    follows: bool = False
    """a part of the launch before it, which costs no launch of its own"""
    on: Launch | None = None
    """what is waited for"""
    made: int = -1
    """the storage that it fills first, by its number"""
    times: float = 1.0
    """how many times as long it takes as one that only moves its bytes"""

    def again(self, moment: Moment, name: str, ranks: tuple[int, ...], on: Launch | None) -> Launch:
        """The same for another block, micro-batch or rank."""
        return Launch(
            self.kind, self.stream, self.operator, moment, name, self.nbytes, self.flops, self.dtype,
            self.dims, ranks, self.compiled, self.follows, on, self.made, self.times,
        )  # fmt: skip


class Cost(NamedTuple):
    """What an operator does, apart from where and when."""

    kind: Kind
    nbytes: int
    flops: int
    dtype: str
    dims: Dims | Heads | None
    times: float = 1.0
    """how many times as long as its bytes alone take"""


WIDENING = 2.2  # torch 2.11's copy from bf16 to fp32 on an H200: 1.9 TB/s, where others reach 4.2
FREE = {
    "aten::detach", "aten::alias", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::new_empty_strided", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::set_", "aten::record_stream",
    "aten::_assert_async", "aten::_assert_tensor_metadata", "aten::is_pinned", "aten::_pin_memory", "aten::view",
}  # fmt: skip
"""operators that launch nothing"""
GROUPED = 1.24  # a product of groups by torch 2.11 on an H200: 570 TFLOP/s, where one of as many rows has 705
GATHERED_ROWS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"}
"""of whose first argument only what is asked for is read"""


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> Cost | None:
    """What one call of an operator does on its device; None if nothing."""
    name = func._schema.name
    if name in FREE or func.is_view or (not outputs and not func._schema.is_mutable):
        return None
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    first = next((tensor for tensor in (*outputs, *tensors) if tensor.device.type != "meta"), None)
    if first is None:
        return None
    if "scaled_dot_product" in name and not name.endswith("_math"):
        heads = _heads(func, args, kwargs)
        return Cost(
            "attention", _bytes(tensors) + _bytes(outputs), _attention_flops(heads), _dtype(args[0]), heads
        )
    dims = _dims(func, args, outputs)
    nbytes = _moved(func, args, kwargs, tensors, outputs)
    if dims is not None:
        flops, times = 2 * dims.batch * dims.m * dims.n * dims.k, GROUPED if "grouped" in name else 1.0
        return Cost("matmul", nbytes, flops, _dtype(_left(func, args)), dims, times)
    packet = func._overloadpacket
    if packet in flop_registry and "convolution" in name:
        flops = flop_registry[packet](*args, **kwargs, out_val=_as_returned(func, args, outputs))
        return Cost("matmul", nbytes, flops, _dtype(first), None)
    places = {tensor.device.type for tensor in (*tensors, *outputs) if tensor.dim()}
    if {"cpu", "cuda"} <= places:
        return Cost("transfer", _size(first), 0, _dtype(first), None)
    widens = name in ("aten::_to_copy", "aten::copy_") and _widens(tensors[-1], first)
    return Cost("move", nbytes, 0, _dtype(first), None, WIDENING if widens else 1.0)


def _as_returned(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
    """Of the outputs of a convolution what torch's counter expects: backward gives None for a gradient that nobody asked for."""
    if "backward" not in func._schema.name:
        return outputs[0]
    wanted, given = args[10], iter(outputs)
    return tuple(next(given) if want else None for want in wanted)


def _widens(source: Tensor, made: Tensor) -> bool:
    """Whether a copy turns 16 bits into 32 on a GPU."""
    halves = source.dtype in (torch.bfloat16, torch.float16)
    return halves and made.dtype == torch.float32 and made.device.type == "cuda"


def parts_of(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Cost]]:
    """Of an operator on lists of tensors (an optimizer's, a norm's): what it does to each; its first tensor, and the cost."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    written = [bool(spec.alias_info and spec.alias_info.is_write) for spec in func._schema.arguments]
    writes = [
        flag
        for arg, flag in zip(args, written, strict=False)
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)
    ]
    for index, first in enumerate(lists[0]):
        members = [tensors[index] for tensors in lists if index < len(tensors)]
        moved = sum(_size(tensor) * (2 if flag else 1) for tensor, flag in zip(members, writes, strict=False))
        moved += _size(outputs[index]) if len(outputs) == len(lists[0]) else 0
        yield first, Cost("move", moved, 0, _dtype(first), None)


def on_lists(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator takes lists of tensors, which belong to different parameters."""
    name = func._schema.name
    return (
        ("_foreach_" in name or "_fused_ada" in name or "_fused_sgd" in name) and bool(args) and bool(args[0])
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(map(_size, tensors))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _moved(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor], outputs: Sequence[Tensor]
) -> int:
    """Bytes that are read and written."""
    if func._schema.name in GATHERED_ROWS:
        return 2 * _bytes(outputs) + _bytes(tensors[1:])
    written = _written_arguments(func)
    moved = _bytes([t for t in tensors if 0 not in t.stride()]) + sum(
        _size(leaf)
        for place, arg in enumerate(args)
        if place in written
        for leaf in tree_leaves(arg)
        if isinstance(leaf, Tensor)
    )
    if func._schema.name in (
        "aten::copy_",
        "aten::fill_",
        "aten::zero_",
    ):  # which do not read what they write
        moved -= _size(args[0])
    given = {id(tensor) for tensor in tensors}
    return moved + _bytes([tensor for tensor in outputs if id(tensor) not in given])


@functools.cache
def _written_arguments(func: Any) -> frozenset[int]:
    return frozenset(
        place
        for place, spec in enumerate(func._schema.arguments)
        if spec.alias_info and spec.alias_info.is_write
    )


def _left(func: Any, args: Sequence[Any]) -> Tensor:
    """The left matrix: `addmm` and its like have what is added before it."""
    return args[1] if func._schema.name in ("aten::addmm", "aten::baddbmm") else args[0]


def _dims(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> Dims | None:
    name = func._schema.name
    if name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
        left, right = args[1:3] if name == "aten::addmm" else args[:2]
        return Dims(left.shape[0], right.shape[1], left.shape[1])
    if name in ("aten::bmm", "aten::baddbmm"):
        left, right = args[1:3] if name == "aten::baddbmm" else args[:2]
        return Dims(left.shape[1], right.shape[2], left.shape[2], left.shape[0])
    if name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm"):
        left, right = args[:2]
        if left.dim() == 2 and right.dim() == 2:  # gradients of weights: the sum goes over all tokens
            return Dims(left.shape[0], right.shape[1], left.shape[1])
        return Dims(left.numel() // left.shape[-1], right.shape[-1], left.shape[-1])
    return None


def _heads(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Heads:
    """Arguments of the kernels have names of their own, in orders of their own."""
    names = [spec.name for spec in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    query, key = values["query"], values["key"]
    backward = "backward" in func._schema.name
    return Heads(
        query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3],
        bool(values.get("is_causal", False)), backward,
    )  # fmt: skip


def _attention_flops(heads: Heads) -> int:
    """Of the scores that are computed: half of them where attention is causal. Backward has five products for forward's two."""
    products = 5 if heads.backward else 2
    scores = heads.batch * heads.heads * heads.length * heads.keys
    return products * 2 * scores * heads.width // (2 if heads.causal else 1)


class Travel(NamedTuple):
    """What a collective or a message is."""

    operator: str
    """"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send" or "receive" """
    nbytes: int
    """of the whole tensor"""
    dtype: str
    ranks: tuple[int, ...]
    """among which it is; of a message, the other one"""
    waits: bool
    """the stream from which it is called goes on when it has ended"""


WORDS = {
    "gather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce", "alltoall": "all_to_all",
    "broadcast": "broadcast", "send": "send", "recv": "receive",
}  # fmt: skip
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


def travel_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor]
) -> Travel | None:
    """What an operator of torch's collectives sends; None if it sends nothing."""
    plain = func._schema.name.rpartition("::")[2].replace("_", "")
    word = next((WORDS[part] for part in WORDS if part in plain), None)
    if word is None:
        return None
    values = dict(zip([spec.name for spec in func._schema.arguments], args, strict=False)) | kwargs
    sides = [*values.values(), list(outputs)]
    tensors = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in sides]
    nbytes = max(map(_bytes, tensors))
    first = next(tensor for side in tensors for tensor in side)
    ranks = _ranks(values)
    if word in ("send", "receive"):
        ranks = (ranks[values["dst" if word == "send" else "src"]],)
    waits = func.namespace == "c10d" and values.get("async_op", values.get("asyncOp", True)) is False
    return Travel(word, nbytes, _dtype(first), ranks, waits)


def _ranks(values: dict[str, Any]) -> tuple[int, ...]:
    """Of the group that an operator's arguments name."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup

    names = ("process_group", "group_name", "group")
    group: Any = next(value for name, value in values.items() if name in names)
    if isinstance(group, str):
        find: Any = dist.distributed_c10d._resolve_process_group  # the functional collectives' own way
        group = find(group)
    elif isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))
