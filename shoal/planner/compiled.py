"""Compiled blocks in a simulated world: what `torch.compile` keeps and allocates, without a compiler or a GPU.

Dynamo and AOTAutograd run as they are, so graphs of forward and backward, and what goes from one to the other, are those of a
real run. In place of Inductor's code the graphs are interpreted on fake tensors, and what Inductor would not write to memory does
not count:

- A result of an element-wise operation that only others of its kind and reductions read is computed where it is read.
- Results of all other operations, what those read, and what a graph gives are written.
- Memory is freed after its last reader, which may be one that computes a value on the way; an element-wise result takes the
  place of an input of its size that ends with it.

The order of operations is the graph's; Inductor may choose another one with a lower peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
import torch._dynamo
import torch.fx
from torch import Tensor

from shoal.planner.fake_device import replace
from shoal.planner.tape import Tape

Node = torch.fx.Node


def simulate_compile(undo: ExitStack, tape: Tape) -> None:
    """Until `undo` is closed `torch.compile` gives functions whose memory is recorded as a compiled one's."""
    compile_ = torch.compile
    backend = partial(_backend, tape=tape)  # one, so that blocks that are alike are compiled once
    undo.callback(torch._dynamo.reset)

    def simulated(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        whole = bool(options.get("fullgraph", False))
        compiled = compile_(function, backend=backend, fullgraph=whole)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # inside of a larger graph
                return function(*args, **kwargs)
            with tape.paused():
                return compiled(*args, **kwargs)

        return run

    replace(undo, torch, "compile", simulated)


def _backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], *, tape: Tape) -> Callable[..., Any]:
    """From Dynamo's graph to a function that runs what AOTAutograd makes of it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=partial(_program, tape=tape, donated=False),
        bw_compiler=partial(_program, tape=tape, donated=True),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )(graph, inputs)


def _program(
    graph: torch.fx.GraphModule, _inputs: Sequence[Any], *, tape: Tape, donated: bool
) -> Callable[..., Any]:
    """A function of a list of arguments, which it empties, as Inductor's do."""
    program = Program(graph, donated=donated)

    def run(arguments: list[Any]) -> Any:
        with tape.paused():  # backward is called by autograd, where it is not
            return program.run(arguments, tape)

    run._boxed_call = True  # pyrefly: ignore[missing-attribute]
    return run


class Program:
    """A graph, and what of it is written to memory when.

    Args:
        donated: memory of inputs may be used again: of what forward kept for backward.
    """

    def __init__(self, graph: torch.fx.GraphModule, *, donated: bool) -> None:
        self._graph, self._donated = graph, donated
        self._nodes = list(graph.graph.nodes)
        self.written = self._find_written()
        self._ends = self._find_ends()

    def run(self, arguments: list[Any], tape: Tape) -> Any:
        """The graph's outputs; `tape` sees what is written."""
        values: dict[Node, Any] = {}
        inputs = iter(arguments)
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
        arguments.clear()
        inputs = iter(())
        for node in self._nodes:
            if node.op == "output":
                return torch.fx.node.map_arg(node.args[0], values.__getitem__)
            if node.op == "get_attr":
                values[node] = getattr(self._graph, str(node.target))
            elif node.op == "call_function":
                self._call(node, values, tape)
            for ended in self._ends.get(node, ()):
                values.pop(ended, None)
        return None

    def _call(self, node: Node, values: dict[Node, Any], tape: Tape) -> None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node not in self.written:
            values[node] = node.target(*args, **kwargs)  # pyrefly: ignore[not-callable]
            return
        if _is_pointwise(node):  # its result is known beforehand, so that it can take an input's place
            del args, kwargs
            self._take_place(node, values)
            made = node.meta["val"]
            with tape.resumed():
                values[node] = torch.empty_strided(
                    made.shape, made.stride(), dtype=made.dtype, device=made.device
                )
            return
        with tape.resumed():
            values[node] = node.target(*args, **kwargs)  # pyrefly: ignore[not-callable]

    def _take_place(self, node: Node, values: dict[Node, Any]) -> None:
        """Let go of one input that ends here and is as large as the result."""
        made = node.meta["val"]
        for ended in self._ends.get(node, ()):
            tensor = values.get(ended)
            usable = isinstance(tensor, Tensor) and (ended.op != "placeholder" or self._donated)
            if usable and tensor.dtype == made.dtype and tensor.numel() == made.numel():
                del values[ended]
                return

    def _find_written(self) -> set[Node]:
        """Nodes whose results are in memory, of those that are no views of others."""
        wanted: set[Node] = set()
        for node in self._nodes:
            if node.op == "output" or (node.op == "call_function" and _is_kernel(node)):
                wanted.update(_base(source) for source in node.all_input_nodes)
            if node.op == "call_function" and (_is_kernel(node) or _is_reduction(node)):
                wanted.add(node)
        return {node for node in wanted if node.op == "call_function" and not _is_view(node)}

    def _find_ends(self) -> dict[Node, list[Node]]:
        """After which node each value is not needed any more, seen through what is computed on the way."""
        reads: dict[
            Node, set[Node]
        ] = {}  # memory that a value is computed from, where it is not in memory itself
        last: dict[Node, Node] = {}
        for node in self._nodes:
            sources: set[Node] = set()
            for source in node.all_input_nodes:
                last[source] = node
                sources |= {source} | reads.get(source, set())
            for source in sources:
                last[source] = node
            in_memory = node.op != "call_function" or node in self.written
            reads[node] = set() if in_memory else sources
        ends: dict[Node, list[Node]] = {}
        for node, reader in last.items():
            ends.setdefault(reader, []).append(node)
        return ends


def _base(node: Node) -> Node:
    """What a node is a view of, or itself."""
    while node.op == "call_function" and (_is_view(node) or _is_item(node)):
        node = node.all_input_nodes[0]
    return node


def _is_item(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _is_item(node)


def _is_pointwise(node: Node) -> bool:
    target: Any = node.target
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags or str(getattr(target, "overloadpacket", target)) in _ELEMENT_WISE


def _is_reduction(node: Node) -> bool:
    return str(getattr(node.target, "overloadpacket", node.target)) in _REDUCTIONS


def _is_kernel(node: Node) -> bool:
    """Whether an operation is a kernel of its own, that reads and writes memory."""
    return not (_is_view(node) or _is_pointwise(node) or _is_reduction(node))


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
