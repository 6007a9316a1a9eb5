"""Forward and backward of a step, recorded once as a CUDA graph and launched as one: the host launches thousands of kernels less.

Only gradients are recorded. The reduction of their norm and the update depend on numbers of the host, and are launched as ever.

[Note: memory] What a recording holds, gradients too, has its place in a pool of its own, and keeps it between steps. What steps
before it held is given back first, so that a rank reserves about as much as without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shoal.data.cut import MicroBatch
from shoal.observe.calls import Noted
from shoal.plan import MOST_RECORDED
from shoal.world import World

STEPS_BEFORE = 2
"""that are launched as ever: they compile, choose kernels and lay out what is sharded"""

OTHERS = 8
"""steps of another form in a row, after which a recording is given up, and the memory that it keeps"""
PLAIN = (str, int, float, bool, type(None))
"""what of a batch may be beside tensors: it is compared, and recorded as it is"""


class Way(IntEnum):
    """How a step is taken."""

    LAUNCH = 0
    RECORD = 1
    REPLAY = 2


class Pass(NamedTuple):
    """What a forward and backward over a rank's micro-batches gave, beside gradients: what the rank adds to the sums over all."""

    loss: Tensor
    weight: Tensor
    losses: Tensor
    """(micro-batches,) sums of losses of each, where this rank computes it"""
    squares: tuple[Tensor | None, ...] = ()
    """for each exchange of gradients the sum of their squares, where it was found on the way"""


class Brought(NamedTuple):
    """A micro-batch on its device."""

    data: Any
    counts: float
    """1, or 0 for a filler, which keeps ranks in step and adds nothing"""


class Work(NamedTuple):
    """A step's forward and backward, in parts."""

    run: Callable[[Sequence[MicroBatch]], Pass]
    """all of it, as micro-batches come"""
    bring: Callable[[Sequence[MicroBatch]], Iterable[Brought]]
    """micro-batches on their device, one after the other, with what the host does for each"""
    compute: Callable[[Brought, bool], Tensor]
    """what the device does for one, of which is said whether it is the last: as `as_pass` takes it"""
    squares: Callable[[], tuple[Tensor | None, ...]]
    """of `Pass`, after the last one"""
    prepare: Callable[[], None]
    """give up what is gathered, and have ready what is to be: a recording gathers for itself, and casts no weights"""
    done: Callable[[], None]
    """what was ready has been gathered: a replay does not tell the model"""


class Graph(NamedTuple):
    """A recorded step, its input and what it gives."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Brought]
    found: Pass
    calls: list[Noted]
    """collectives in it"""


def as_pass(shares: Sequence[Tensor], squares: tuple[Tensor | None, ...]) -> Pass:
    """Of each micro-batch's (3,) sum of losses, and what the rank adds to the sums of losses and of weights over all."""
    total = torch.zeros_like(shares[0][1:])
    for share in shares:
        total += share[1:]
    return Pass(total[0], total[1], torch.stack([share[0] for share in shares]), squares)


class Recorded:
    """Takes the place of a forward and backward that does the same in every step.

    Args:
        parameters: whose gradients it makes.
    """

    def __init__(self, work: Work, parameters: Iterable[nn.Parameter], world: World) -> None:
        self._work, self._parameters, self._world = work, list(parameters), world
        self._form: list[Any] = []
        self._seen = 0
        self._graph: Graph | None = None
        self._gradients: list[Tensor | None] = []
        self._others = 0
        this = weakref.ref(self)

        def forget() -> None:
            if (recorded := this()) is not None:
                recorded.forget()

        world.at_close(forget)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Pass:
        """Gradients, into the parameters. Collective.

        Raises:
            RuntimeError: something in it cannot be recorded. ValueError: it draws random numbers.
        """
        way = self._agreed(self._way(micro_batches))
        if way is Way.LAUNCH:
            return self._launch(micro_batches)
        self._others = 0
        self._work.prepare()
        brought = list(self._work.bring(micro_batches))
        graph = self._graph if way is Way.REPLAY and self._graph is not None else self._record(brought)
        torch._foreach_copy_(_tensors(graph.inputs), _tensors(brought))
        return self._replay(graph)

    def forget(self) -> None:
        """Give up what is recorded; NCCL does not end a group while a recording sends in it."""
        if self._graph is not None:
            self._graph.graph.reset()
        self._graph, self._gradients, self._seen, self._others = None, [], 0, 0

    def _way(self, micro_batches: Sequence[MicroBatch]) -> Way:
        """What this rank could do."""
        form = [_form(micro) for micro in micro_batches]
        if None in form or len(form) > MOST_RECORDED:
            return Way.LAUNCH
        if self._graph is not None:
            return Way.REPLAY if form == self._form else Way.LAUNCH
        if form != self._form:
            self._form, self._seen = form, 0
        return Way.RECORD if self._seen >= STEPS_BEFORE else Way.LAUNCH

    def _agreed(self, way: Way) -> Way:
        """What all ranks can do: NCCL takes a collective that some ranks record and others launch for different ones.

        By their hosts, which do not wait for devices. Collective.
        """
        if self._world.size == 1:
            return way
        least = torch.tensor(int(way))
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return Way(int(least))

    def _launch(self, micro_batches: Sequence[MicroBatch]) -> Pass:
        self._seen += 1
        self._others += self._graph is not None
        if self._others == OTHERS:
            self.forget()
        found = self._work.run(micro_batches)
        self._require_no_draws()
        return found

    def _replay(self, graph: Graph) -> Pass:
        if self._world.calls is not None:
            for noted in graph.calls:
                self._world.calls.add(*noted)
        graph.graph.replay()
        self._work.done()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        # the next replay writes over them, and they may not have been read by then
        return tree_map_only(Tensor, torch.clone, graph.found)

    def _record(self, brought: Sequence[Brought]) -> Graph:
        for parameter in self._parameters:
            parameter.grad = None
        places = [Brought(tree_map_only(Tensor, torch.clone, data), counts) for data, counts in brought]
        try:
            self._graph = self._recorded(places)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            raise RuntimeError(
                f"plan.cuda_graphs: the forward and backward could not be recorded: {error}; what waits for the device "
                "(.item(), .tolist(), nonzero, a copy out of the host's pageable memory) cannot be; leave plan.cuda_graphs out, "
                "or set it to false"
            ) from error
        self._gradients = [parameter.grad for parameter in self._parameters]
        return self._graph

    def _recorded(self, places: list[Brought]) -> Graph:
        def work() -> Pass:
            shares = [self._work.compute(place, place is places[-1]) for place in places]
            return as_pass(shares, self._work.squares())

        calls = self._world.calls
        with calls.kept() if calls is not None else nullcontext([]) as noted:
            graph, found = capture(work)
        return Graph(graph, places, found, noted)

    def _require_no_draws(self) -> None:
        """Each micro-batch seeds the device's generator anew, whose offset then tells whether anything was drawn.

        The host's tells nothing: threads that load data draw from it, too.
        """
        if torch.cuda.default_generators[self._world.device.index or 0].get_offset() > 0:
            raise ValueError(
                "plan.cuda_graphs records a step, and random numbers of this model (dropout) would not follow their seeds in a "
                "recording; leave it out, or set dropout to 0"
            )


def capture(work: Callable[[], Pass]) -> tuple[torch.cuda.CUDAGraph, Pass]:
    """Record what `work` launches; its results are there after a replay."""
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads of this process, NCCL's among them, may ask the device what they like meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return graph, work()
    except BaseException:
        with suppress(RuntimeError):
            graph.reset()  # the error may hold it until the groups end
        raise


def _form(micro: MicroBatch) -> tuple[Any, ...] | None:
    """All that must be equal for a recording to be of the same work; None for data that is not of tensors and plain values."""
    leaves, tree = tree_flatten(micro.data)
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves) or not _tensors([Brought(leaves, 1.0)]):
        return None
    forms = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return (tree, micro.samples > 0, *forms)


def _tensors(brought: Sequence[Brought]) -> list[Tensor]:
    return [leaf for data, _ in brought for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)]
