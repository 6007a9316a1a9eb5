"""What of a graph a compiler writes to memory, when that is let go, and which operations become one kernel.

- A result of an element-wise operation that only others of its kind and reductions read is computed where it is read.
- Results of all other operations, what those read, and what a graph gives are written.
- Memory is freed after its last reader, which may be one that computes a value on the way.
- Element-wise operations and reductions between two kernels of other kinds are one kernel; sums over columns are another one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor

Node = torch.fx.Node
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


FUSED = 1.25  # by how much fused kernels take longer than an operator's of as many bytes, on H200s: 1.31 in 8B, 1.23 in 1.24B
QUANTIZING = 2.5  # those that find a largest element, or scale and cast to 8 bits: 103 ms of 8B in float8


class Fused(NamedTuple):
    """A kernel of several operations."""

    names: tuple[str, ...]
    nbytes: int
    """that it reads and writes"""
    dtype: str
    times: float
    """how many times as long it takes as its bytes alone"""


class Fusion:
    """The analysis of a graph."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.written = self._find_written()
        self._sources = self._find_sources()
        self.ends = self._find_ends()
        self.kernels = self._fuse()
        """by the first node of each that is written"""

    def _find_written(self) -> set[Node]:
        """Nodes whose results are in memory, of those that are no views of others."""
        wanted: set[Node] = set()
        for node in self.nodes:
            if node.op == "output" or (node.op == "call_function" and is_kernel(node)):
                filled = _filled_first(node)
                wanted.update(base_of(source) for source in node.all_input_nodes if source is not filled)
            if node.op == "call_function" and (is_kernel(node) or is_reduction(node)):
                wanted.add(node)
        return {node for node in wanted if node.op == "call_function" and not is_view(node)}

    def _find_sources(self) -> dict[Node, dict[Node, None]]:
        """What each node is computed from, in order, seen through what is computed on the way."""
        found: dict[Node, dict[Node, None]] = {}
        for node in self.nodes:
            sources: dict[Node, None] = {}
            for source in node.all_input_nodes:
                sources[source] = None
                if source.op == "call_function" and source not in self.written:
                    sources |= found[source]
            found[node] = sources
        return found

    def _find_ends(self) -> dict[Node, list[Node]]:
        """After which node each value is not needed any more."""
        last = {source: node for node in self.nodes for source in self._sources[node]}
        ends: dict[Node, list[Node]] = {}
        for node, reader in last.items():
            ends.setdefault(reader, []).append(node)
        return ends

    def _fuse(self) -> dict[Node, Fused]:
        depth: dict[Node, int] = {}
        groups: dict[tuple[int, bool], list[Node]] = defaultdict(list)
        for node in self.nodes:
            depth[node] = max((depth[source] for source in node.all_input_nodes), default=0)
            if node.op != "call_function":
                continue
            if is_kernel(node):
                depth[node] += 1
            elif node in self.written:
                groups[depth[node], _sums_columns(node)].append(node)
        return {members[0]: self._fused(members) for members in groups.values()}

    def _fused(self, members: list[Node]) -> Fused:
        own, read = set(members), {}
        for node in members:
            for source in self._sources[node]:
                if source not in own and (source.op != "call_function" or source in self.written):
                    read[source] = max(read.get(source, 0), self._read_of(source, node))
        nbytes = sum(read.values()) + sum(_size(node) for node in members)
        names = tuple(str(getattr(node.target, "overloadpacket", node.target)) for node in members)
        first = members[0].meta["val"]
        fused = FUSED if isinstance(first, Tensor) and first.is_cuda else 1.0
        times = QUANTIZING if any(map(_quantizes, members)) else fused
        return Fused(names, nbytes, str(getattr(first, "dtype", "")).removeprefix("torch."), times)

    def _read_of(self, source: Node, node: Node) -> int:
        """Bytes of a source that are read for a node: of a table from which rows are taken, those rows."""
        users = [user for user in source.users if user is node or user in self._sources[node]]
        if users and all(_takes_rows(user, source) for user in users):
            return sum(_size(user) for user in users)
        return _size(source)


def _quantizes(node: Node) -> bool:
    """Whether it is of a cast to 8 bits: the cast itself, or the largest element of a whole tensor."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor):
        return False
    packet = str(getattr(node.target, "overloadpacket", ""))
    return made.dtype in FLOAT8 or (packet in ("aten.max", "aten.amax") and made.numel() == 1)


def _filled_first(node: Node) -> Node | None:
    """What an operation that puts elements into a copy begins with, where that is computed into the copy at once."""
    if str(getattr(node.target, "overloadpacket", "")) not in _PUTS:
        return None
    first = node.args[0]
    return first if isinstance(first, Node) and first.op == "call_function" and is_pointwise(first) else None


def _takes_rows(node: Node, source: Node) -> bool:
    packet = str(getattr(node.target, "overloadpacket", ""))
    return (
        packet in ("aten.embedding", "aten.index", "aten.gather")
        and bool(node.args)
        and node.args[0] is source
    )


def _sums_columns(node: Node) -> bool:
    """Whether a reduction goes over dims that are not the last: it is spread over the device in another way."""
    if not is_reduction(node) or len(node.args) < 2 or not isinstance(node.args[1], list | tuple):
        return False
    value = node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, Tensor) or not value.dim():
        return False
    summed: list[Any] = list(node.args[1])
    return bool(summed) and value.dim() - 1 not in {dim % value.dim() for dim in summed}


def _size(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return 0
    return int(value.numel()) * value.element_size()


def base_of(node: Node) -> Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and (is_view(node) or _is_item(node)):
        node = node.all_input_nodes[0]
    return node


def _is_item(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _is_item(node)


def is_pointwise(node: Node) -> bool:
    target: Any = node.target
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags or str(getattr(target, "overloadpacket", target)) in _ELEMENT_WISE


def is_reduction(node: Node) -> bool:
    return str(getattr(node.target, "overloadpacket", node.target)) in _REDUCTIONS


def is_kernel(node: Node) -> bool:
    """Whether an operation is a kernel of its own, that reads and writes memory."""
    return not (is_view(node) or is_pointwise(node) or is_reduction(node))


_PUTS = ("aten.scatter_add", "aten.scatter_reduce", "aten.index_put")
_CREATED = "arange full full_like iota lift_fresh_copy new_zeros ones ones_like rand randn scalar_tensor zeros zeros_like"
_MOVED = "_to_copy cat clone constant_pad_nd embedding expand gather index repeat scatter select_scatter slice_scatter"
_CHOSEN = "fill masked_fill tril triu where"
_ELEMENT_WISE = {f"aten.{name}" for name in f"{_CREATED} {_MOVED} {_CHOSEN}".split()} | {
    "prims.iota",
    "prims.convert_element_type",
    "prims.device_put",
}
"""besides those that torch tags so: computed for each element from a few others"""
_SUMMED = "sum mean var var_mean prod norm linalg_vector_norm all any"
_CHOSEN_OF_MANY = "amax amin argmax argmin max min"
_REDUCTIONS = {f"aten.{name}" for name in f"{_SUMMED} {_CHOSEN_OF_MANY}".split()}
