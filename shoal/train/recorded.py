"""Forward and backward of a step, recorded once as a CUDA graph and launched as one: thousands of launches less for the host.

Only gradients are recorded. The reduction of their norm and the update depend on numbers of the host, and are launched as ever.

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
from shoal.world import World

STEPS_BEFORE = 2
"""that are taken as ever: they compile, choose kernels and lay out what is sharded"""


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


class Recorded:
    """Takes the place of a forward and backward that does the same in every step.

    Args:
        run: the forward and backward over micro-batches, as they come.
        bring: micro-batches on their device, one after the other, with what the host does for each.
        compute: what the device does for so many that were brought.
        parameters: whose gradients it makes.

    Raises:
        RuntimeError: when called, if something in it cannot be recorded; the message says what, and to leave out the plan's key.
    """

    def __init__(
        self,
        run: Callable[[Sequence[MicroBatch]], Pass],
        bring: Callable[[Sequence[MicroBatch]], Iterable[Brought]],
        compute: Callable[[Iterable[Brought], int], Pass],
        parameters: Iterable[nn.Parameter],
        world: World,
    ) -> None:
        self._run, self._bring, self._compute = run, bring, compute
        self._parameters, self._world = list(parameters), world
        self._forms: list[Any] = []
        self._seen = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Brought] = []
        self._found: Pass | None = None
        self._gradients: list[Tensor | None] = []
        self._calls: list[Any] = []
        world.at_close(self.forget)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Pass:
        """Gradients, into the parameters. Collective."""
        forms = [_form(micro) for micro in micro_batches]
        if self._graph is None and forms != self._forms:
            self._forms, self._seen = forms, 0
        if forms != self._forms or (self._graph is None and self._seen < STEPS_BEFORE):
            self._seen += 1
            found = self._run(micro_batches)
            self._require_no_draws()
            return found
        brought = list(self._bring(micro_batches))
        if self._graph is None:
            self._record(brought)
        return self._replay(brought)

    def forget(self) -> None:
        """Give up what is recorded; NCCL does not end a group that a recording sends in."""
        self._graph, self._found, self._inputs, self._gradients, self._seen = None, None, [], [], 0

    def _record(self, brought: list[Brought]) -> None:
        self._inputs = [Brought(tree_map_only(Tensor, torch.clone, data), counts) for data, counts in brought]
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        calls = self._world.calls
        noted = calls.kept() if calls is not None else nullcontext([])
        try:
            # other threads of this process, NCCL's among them, may ask the device what they like meanwhile
            with noted as self._calls, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._found = self._compute(iter(self._inputs), len(self._inputs))
        except RuntimeError as error:
            raise RuntimeError(
                f"plan.cuda_graphs: a step's forward and backward could not be recorded: {error}; what waits for the device "
                "(.item(), .tolist(), nonzero, a copy out of the host's pageable memory) or draws with a generator of its "
                "own cannot be; leave plan.cuda_graphs out, or set it to false"
            ) from error
        self._graph = graph
        self._gradients = [parameter.grad for parameter in self._parameters]

    def _replay(self, brought: list[Brought]) -> Pass:
        if self._graph is None or self._found is None:
            raise RuntimeError("nothing is recorded")
        torch._foreach_copy_(_tensors(self._inputs), _tensors(brought))
        if self._world.calls is not None:
            for call in self._calls:
                self._world.calls.add(*call)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        # the next replay writes over them, and they may not have been read by then
        return tree_map_only(Tensor, torch.clone, self._found)

    def _require_no_draws(self) -> None:
        """Each micro-batch seeds the generator anew, whose offset then tells whether anything was drawn.

        Raises:
            ValueError: it was: a recording would not be seeded.
        """
        device = self._world.device
        if torch.cuda.default_generators[device.index or 0].get_offset() > 0:
            raise ValueError(
                "plan.cuda_graphs records a step, and random numbers of this model (dropout) would not follow their seeds in a "
                "recording; leave it out, or set dropout to 0"
            )


def _form(micro: MicroBatch) -> tuple[Any, ...]:
    """All that must be equal for a recording to be of the same work."""
    leaves, tree = tree_flatten(micro.data)
    forms = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return (tree, micro.samples > 0, *forms)


def _tensors(brought: Iterable[Brought]) -> list[Tensor]:
    return [leaf for data, _ in brought for leaf in tree_flatten(data)[0] if isinstance(leaf, Tensor)]
