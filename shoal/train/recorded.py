"""Forward and backward of micro-batches, recorded once as CUDA graphs and launched as such: the host launches thousands less.

Only gradients are recorded. The reduction of their norm and the update depend on numbers of the host, and are launched as ever.

[Note: three graphs] The first micro-batch of a step makes gradients, the others add to them, and after the last they are sent:
three kinds of work, whatever the number of micro-batches. Graphs share memory, since they run one after the other.

[Note: memory] What a recording holds, gradients too, has its place in a pool of its own, and keeps it between steps. What steps
before it held is given back first, so that a rank reserves about as much as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shoal.data.cut import MicroBatch
from shoal.observe.calls import Noted
from shoal.world import World

STEPS_BEFORE = 2
"""that are launched as ever: they compile, choose kernels and lay out what is sharded"""


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


class Graph(NamedTuple):
    """The recorded work of one kind of micro-batch, its input and what it gives."""

    graph: torch.cuda.CUDAGraph
    input: Brought
    share: Tensor
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
        self._form: Any = None
        self._seen = 0
        self._graphs: list[Graph] = []
        self._gradients: list[Tensor | None] = []
        self._squares: tuple[Tensor | None, ...] = ()
        world.at_close(self.forget)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Pass:
        """Gradients, into the parameters. Collective.

        Raises:
            RuntimeError: something in it cannot be recorded. ValueError: it draws random numbers.
        """
        form = _form(micro_batches)
        if not self._graphs and form != self._form:
            self._form, self._seen = form, 0
        if form is None or form != self._form or (not self._graphs and self._seen < STEPS_BEFORE):
            self._seen += 1
            found = self._work.run(micro_batches)
            self._require_no_draws()
            return found
        shares: list[Tensor] = []
        for index, brought in enumerate(self._work.bring(micro_batches)):
            if not self._graphs:
                self._record(brought, len(micro_batches))
            graph = self._graphs[_kind(index, len(micro_batches))]
            torch._foreach_copy_(_tensors(graph.input), _tensors(brought))
            self._replay(graph)
            shares.append(graph.share.clone())  # the next replay writes over it
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return as_pass(shares, tree_map_only(Tensor, torch.clone, self._squares))

    def forget(self) -> None:
        """Give up what is recorded; NCCL does not end a group while a recording sends in it."""
        self._graphs, self._gradients, self._squares, self._seen = [], [], (), 0

    def _replay(self, graph: Graph) -> None:
        if self._world.calls is not None:
            for noted in graph.calls:
                self._world.calls.add(*noted)
        graph.graph.replay()

    def _record(self, like: Brought, count: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        graphs: list[Graph] = []
        kinds = sorted({_kind(index, count) for index in range(count)})
        try:
            for kind in kinds:
                pool = graphs[0].graph.pool() if graphs else None
                graphs.append(self._recorded(like, pool, last=kind == kinds[-1]))
        except RuntimeError as error:
            raise RuntimeError(
                f"plan.cuda_graphs: the forward and backward could not be recorded: {error}; what waits for the device "
                "(.item(), .tolist(), nonzero, a copy out of the host's pageable memory) cannot be; leave plan.cuda_graphs out, "
                "or set it to false"
            ) from error
        self._graphs, self._squares = graphs, self._work.squares()
        self._gradients = [parameter.grad for parameter in self._parameters]

    def _recorded(self, like: Brought, pool: Any, *, last: bool) -> Graph:
        place = Brought(tree_map_only(Tensor, torch.clone, like.data), like.counts)
        graph, calls = torch.cuda.CUDAGraph(), self._world.calls
        # other threads of this process, NCCL's among them, may ask the device what they like meanwhile
        with (
            calls.kept() if calls is not None else nullcontext([]) as noted,
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            share = self._work.compute(place, last)
        return Graph(graph, place, share, noted)

    def _require_no_draws(self) -> None:
        """Each micro-batch seeds the generator anew, whose offset then tells whether anything was drawn."""
        device = self._world.device
        if torch.cuda.default_generators[device.index or 0].get_offset() > 0:
            raise ValueError(
                "plan.cuda_graphs records a step, and random numbers of this model (dropout) would not follow their seeds in a "
                "recording; leave it out, or set dropout to 0"
            )


def _kind(index: int, count: int) -> int:
    """Which of the graphs a micro-batch has: the first, those between, the last.

    Example:
        >>> [_kind(index, 4) for index in range(4)], [_kind(index, 2) for index in range(2)], _kind(0, 1)
        ([0, 1, 1, 2], [0, 1], 0)
    """
    return min(index, 1) if index < count - 1 else min(count, 3) - 1


def _form(micro_batches: Sequence[MicroBatch]) -> Any:
    """All that must be equal for a recording to be of the same work; None, if micro-batches differ among themselves."""
    forms = [_form_of(micro) for micro in micro_batches]
    return (len(forms), forms[0]) if all(form == forms[0] for form in forms) else None


def _form_of(micro: MicroBatch) -> tuple[Any, ...]:
    leaves, tree = tree_flatten(micro.data)
    forms = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (tree, micro.samples > 0, *forms)


def _tensors(brought: Brought) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(brought.data)[0] if isinstance(leaf, Tensor)]
