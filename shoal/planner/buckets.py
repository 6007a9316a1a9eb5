"""Copies of a model in a simulated world: what torch's `DistributedDataParallel` does to memory, without its C++ reducer.

The reducer reads values and asks for a device, and what it allocates no operator shows. Here are its buckets: at first one of all
parameters (or, where a forward may leave parameters out, of the final size), after the first backward new ones in the order in
which gradients came. Gradients are views of them. Source: torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.tensors import map_tensors

FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # torch's own
BROADCAST_BYTES = 250 << 20  # of parameters that are sent at a time when copies are made
IN_FLIGHT = 2


class SimulatedCopies(DistributedDataParallel):
    """Stands for `DistributedDataParallel` with `gradient_as_bucket_view=True`."""

    def __init__(
        self, module: nn.Module, *, process_group: dist.ProcessGroup, find_unused_parameters: bool, **_: Any
    ) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, process_group
        self.find_unused_parameters, self.require_backward_grad_sync = find_unused_parameters, True
        self._parameters_in_order = [p for p in module.parameters() if p.requires_grad]
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._waiting: list[int] = []
        self._flat: list[Tensor] = []
        self._arrived: list[nn.Parameter] = []
        self._flying: list[Any] = []
        self._rebuilt = find_unused_parameters
        _send_from_rank_0(module, process_group)
        first = (FIRST_BYTES, BUCKET_BYTES) if find_unused_parameters else (sys.maxsize,)
        self._make_buckets(self._parameters_in_order, first, reverse=True)
        for parameter in self._parameters_in_order:
            parameter.register_post_accumulate_grad_hook(partial(self._came))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; where parameters may be left out, torch looks for them from copies of it."""
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._rebuild()
            self._begin()
        output = self.module(*args, **kwargs)
        return map_tensors(output, torch.clone) if self.find_unused_parameters else output

    def _make_buckets(
        self, parameters: list[nn.Parameter], limits: tuple[int, ...], *, reverse: bool
    ) -> None:
        self._views, self._flat = {}, []
        tensors: list[Tensor] = list(parameters)
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, list(limits))
        for number, members in enumerate(reversed(indices) if reverse else indices):
            own = [parameters[index] for index in members]
            flat = torch.empty(sum(p.numel() for p in own), dtype=own[0].dtype, device=own[0].device)
            parts = flat.split([p.numel() for p in own])
            for parameter, part in zip(own, parts, strict=True):
                self._views[parameter], self._bucket_of[parameter] = part.view_as(parameter), number
            self._flat.append(flat)

    def _rebuild(self) -> None:
        """Buckets in the order of the first backward, which replace those that there were."""
        if not self._rebuilt and self._arrived:
            self._make_buckets(self._arrived, (FIRST_BYTES, BUCKET_BYTES), reverse=False)
            self._rebuilt = True

    def _begin(self) -> None:
        self._arrived = []
        self._waiting = [0] * len(self._flat)
        for number in self._bucket_of.values():
            self._waiting[number] += 1

    @torch.no_grad()
    def _came(self, parameter: nn.Parameter) -> None:
        """A gradient is there: it goes into its bucket, and the bucket is sent when all of its gradients are there."""
        if not self.require_backward_grad_sync:
            return
        view, gradient = self._views[parameter], parameter.grad
        if gradient is not None and gradient.untyped_storage()._cdata != view.untyped_storage()._cdata:
            view.copy_(gradient)
        parameter.grad = view
        self._arrived.append(parameter)
        number = self._bucket_of[parameter]
        self._waiting[number] -= 1
        if self._waiting[number] == 0:
            self._flying.append(dist.all_reduce(self._flat[number], group=self.process_group, async_op=True))
        if not any(self._waiting):  # the reducer's end of backward: the update comes after all of them
            for work in self._flying:
                work.wait()
            self._flying = []


@torch.no_grad()
def _send_from_rank_0(module: nn.Module, group: dist.ProcessGroup) -> None:
    """The first rank's parameters and buffers go to all, flattened, a few large messages at a time."""
    tensors: list[Tensor] = [t.detach() for t in (*module.parameters(), *module.buffers())]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, [BROADCAST_BYTES])
    flying: list[Tensor] = []
    for members in indices:
        flat = torch.cat([tensors[index].reshape(-1) for index in members])
        dist.broadcast(flat, group_src=0, group=group, async_op=True)
        flying = [*flying, flat][-IN_FLIGHT:]
