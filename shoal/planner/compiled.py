"""Compiled blocks in a simulated world: what `torch.compile` keeps and allocates, without a compiler or a GPU.

Dynamo and AOTAutograd run as they are, so graphs of forward and backward, and what goes from one to the other, are those of a
real run. In place of Inductor's code, what it would write to memory is allocated and the kernels that it would make are told:
see `shoal.planner.fusion`. An element-wise result takes the place of an input of its size that ends with it. The order of
operations is the graph's; Inductor may choose another one with a lower peak.
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
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.planner.fake_device import replace
from shoal.planner.fusion import Fusion, is_kernel, is_pointwise
from shoal.planner.launch import NAMESPACES, Cost, cost_of
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
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=partial(_program, tape=tape, donated=False),
        bw_compiler=partial(_program, tape=tape, donated=True),
        partition_fn=_partition,
        decompositions=select_decomp_table(),
    )(graph, inputs)


def _partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Into forward and backward as Inductor cuts it: first without operations that do nothing, such as a padding of 0."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(joint.graph)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)


def _program(
    graph: torch.fx.GraphModule, _inputs: Sequence[Any], *, tape: Tape, donated: bool
) -> Callable[..., Any]:
    """A function of a list of arguments, which it empties, as Inductor's do."""
    program = Program(graph, donated=donated)

    def run(arguments: list[Any]) -> Any:
        with tape.paused(), tape.compiled("graph"):  # backward is called by autograd, where it is not paused
            return program.run(arguments, tape)

    run._boxed_call = True  # pyrefly: ignore[missing-attribute]
    return run


class Program:
    """A graph that is run on fake tensors: what it writes is allocated, and what it launches is told.

    Args:
        donated: memory of inputs may be used again: of what forward kept for backward.
    """

    def __init__(self, graph: torch.fx.GraphModule, *, donated: bool) -> None:
        self._graph, self._donated = graph, donated
        self.fusion = Fusion(graph.graph)
        self._known = {node for node in self.fusion.written if _is_known(node)}
        self._needed = self._find_needed()
        self._costs: dict[Node, Cost | None] = {}

    def run(self, arguments: list[Any], tape: Tape) -> Any:
        """The graph's outputs; `tape` sees what is written."""
        values: dict[Node, Any] = {}
        inputs = iter(arguments)
        for node in self.fusion.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
        arguments.clear()
        inputs = iter(())
        for node in self.fusion.nodes:
            if node.op == "output":
                return torch.fx.node.map_arg(node.args[0], values.__getitem__)
            if node.op == "get_attr":
                values[node] = getattr(self._graph, str(node.target))
            elif node.op == "call_function":
                self._call(node, values, tape)
            for ended in self.fusion.ends.get(node, ()):
                values.pop(ended, None)
        return None

    def _find_needed(self) -> set[Node]:
        """Nodes that are not written, and whose values are asked for all the same: views that a graph gives, or that an operation
        reads that is run as it is.
        """
        needed: set[Node] = set()
        for node in reversed(self.fusion.nodes):
            runs = node.op == "call_function" and (
                node in needed or (node in self.fusion.written and node not in self._known)
            )
            if node.op == "output" or runs:
                needed.update(source for source in node.all_input_nodes if source not in self.fusion.written)
        return needed

    def _call(self, node: Node, values: dict[Node, Any], tape: Tape) -> None:
        if node not in self.fusion.written:
            if node in self._needed:
                values[node] = _apply(node, values)
            return
        if node in self.fusion.kernels:
            kernel = self.fusion.kernels[node]
            tape.does(
                Cost("move", kernel.nbytes, 0, kernel.dtype, None, kernel.times), ", ".join(kernel.names)
            )
        if node not in self._known:
            with tape.resumed():
                values[node] = _apply(node, values)
            return
        if is_pointwise(node):  # its result is known beforehand, so that it can take an input's place
            self._take_place(node, values)
        values[node] = self._made(node, tape)

    def _made(self, node: Node, tape: Tape) -> Any:
        """What an operation gives, without running it."""
        target: Any = node.target
        made = tree_map_only(Tensor, partial(tape.allocate, operator=str(target)), node.meta["val"])
        if is_kernel(node):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _meta)
            if node not in self._costs:
                outputs = [tensor for tensor in tree_leaves(node.meta["val"]) if isinstance(tensor, Tensor)]
                self._costs[node] = cost_of(target, args, kwargs, outputs)
            tape.runs(target, args, self._costs[node])
        return made

    def _take_place(self, node: Node, values: dict[Node, Any]) -> None:
        """Let go of one input that ends here and is as large as the result."""
        made = node.meta["val"]
        for ended in self.fusion.ends.get(node, ()):
            tensor = values.get(ended)
            usable = isinstance(tensor, Tensor) and (ended.op != "placeholder" or self._donated)
            if usable and tensor.dtype == made.dtype and tensor.numel() == made.numel():
                del values[ended]
                return


def _apply(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # pyrefly: ignore[not-callable]


def _meta(node: Node) -> Any:
    return node.meta["val"]


def _is_known(node: Node) -> bool:
    """Whether all that an operation does is to give new tensors whose sizes are numbers."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in NAMESPACES:
        return False
    schema = target._schema
    if schema.is_mutable or any(result.alias_info for result in schema.returns):
        return False
    values = [source.meta.get("val") for source in (node, *node.all_input_nodes)]
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return bool(leaves) and all(
        isinstance(size, int) for leaf in leaves for size in (*leaf.shape, *leaf.stride())
    )
