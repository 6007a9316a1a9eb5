"""The sum of the squares of all gradients, of which each rank adds up its own share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.exchange import Exchange
from shoal.parallel.spread import Spread
from shoal.plan import Plan
from shoal.world import World


class Squares:
    """A rank's share: every element of every gradient is counted once over all ranks.

    Args:
        kind: the type of the sum.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        world: World,
        spread: Spread,
        kind: torch.dtype,
    ) -> None:
        self._plan, self._world, self._spread, self._kind = plan, world, spread, kind
        self._copies = {name: self._copies_of(name, parameter) for name, parameter in parameters.items()}
        self._exchanges = self._exchanged(parameters)

    def found_on_the_way(self) -> tuple[Tensor | None, ...]:
        """For each exchange of gradients since the last time the sum of their squares, if it is of all of them."""
        return tuple(exchange.take_squares() for exchange, _ in self._exchanges)

    def __call__(self, gradients: Mapping[str, Tensor], known: Sequence[Tensor | None]) -> Tensor:
        """The sum; `known` is what was found on the way, or nothing."""
        total = torch.zeros((), dtype=self._kind, device=self._world.device)
        counted: set[str] = set()
        found: list[Tensor] = []
        for squares, (exchange, names) in zip(known, self._exchanges, strict=bool(known)):
            if squares is not None and not any(map(_is_changed_later, exchange.parameters())):
                found.append(squares)
                counted |= names
        if found:
            total += torch.stack(found).sum()
        rest = {name: gradient for name, gradient in gradients.items() if name not in counted}
        for copies in sorted({self._copies[name] for name in rest}):
            parts = [gradient for name, gradient in rest.items() if self._copies[name] == copies]
            total += sum_of_squares(parts, self._world.device).to(total.dtype) / copies
        return total

    def _exchanged(self, parameters: Mapping[str, nn.Parameter]) -> list[tuple[Exchange, set[str]]]:
        """What sends gradients, and of which parameters, where every element of them is then on one rank."""
        if self._plan.cut != self._plan.world_size:
            return []
        names = {parameter: name for name, parameter in parameters.items()}
        for exchange in self._spread.exchanges:
            exchange.wants_squares = True
        return [
            (exchange, {names[p] for p in exchange.parameters() if p in names})
            for exchange in self._spread.exchanges
        ]

    def _copies_of(self, name: str, parameter: Tensor) -> int:
        """On how many ranks each element of a parameter is."""
        pipeline = self._spread.pipeline
        on = self._world.size // self._plan.pipeline
        if pipeline is not None and name in {tie.name for tie in pipeline.ties}:
            on *= 2
        if not isinstance(parameter, DTensor):
            return on
        mesh, cut = parameter.device_mesh, 1
        for axis, placement in enumerate(parameter.placements):
            cut *= 1 if placement.is_replicate() else mesh.size(axis)
        return on // cut


def _is_changed_later(parameter: nn.Parameter) -> bool:
    """Whether hooks are called with its gradient when that has been received."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def sum_of_squares(parts: list[Tensor], device: torch.device) -> Tensor:
    """Over all elements of all tensors, computed on `device`, wherever they are.

    On a CPU row by row and then in fp64: one long fp32 sum, as a whole tensor's norm is there, is off by 1e-6.
    """
    if device.type == "cuda" and all(part.is_cuda for part in parts):
        return nn.utils.get_total_norm(parts).square()
    if device.type == "cuda":  # by the same kernels, one at a time: together they may not fit
        norms = [torch._foreach_norm([part.to(device, non_blocking=True)])[0] for part in parts]
        return torch.linalg.vector_norm(torch.stack(norms)).square()
    rows = [torch.linalg.vector_norm(part, dim=-1).reshape(-1) for part in parts]
    return torch.cat(rows).double().square_().sum()
