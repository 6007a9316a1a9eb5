"""Optimizers on this rank's own part of every parameter: torch's fused AdamW and SGD over plain local tensors.

[Note: local tensors] An element-wise update of a sharded parameter is the update of each part. Handing torch the local parts,
and not `DTensor`s, keeps its fused kernels (one launch for all parameters) whatever meshes the parameters live on, and
spares the dispatch of a DTensor operation for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.job import Optimizer
from shoal.parallel.places import Ready
from shoal.parallel.replicate import core
from shoal.train.adamw import Tables
from shoal.train.fused import kinds, make, update
from shoal.train.streamed import Streamed


def AdamW(**settings: Any) -> Optimizer:  # noqa: N802 - reads like torch's
    """Settings of AdamW at a constant rate unless `schedule` says otherwise.

    Example:
        >>> AdamW(lr=1e-3).schedule
        'constant'
    """
    return Optimizer.model_validate({"name": "adamw", "schedule": "constant", **settings})


def SGD(**settings: Any) -> Optimizer:  # noqa: N802 - reads like torch's
    """Settings of SGD at a constant rate unless `schedule` says otherwise."""
    return Optimizer.model_validate({"name": "sgd", "schedule": "constant", **settings})


class LocalOptimizer:
    """A torch optimizer over the local parts of a model's trainable parameters.

    Args:
        offload: what is in host memory between steps, of "parameters" and "optimizer".
        device: where updates are computed; left out, where the parameters are.
        first: those that are updated before the others.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Optimizer,
        *,
        offload: Collection[str] = (),
        device: torch.device | None = None,
        first: Collection[nn.Parameter] = (),
    ) -> None:
        self.settings = settings
        self.parameters = {name: p for name, p in core(model).named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no trainable parameter; set requires_grad on those to be trained")
        self._locals = {name: nn.Parameter(local(p)) for name, p in self.parameters.items()}
        moments, masters = "optimizer" in offload and bool(kinds(settings)), "parameters" in offload
        self._update = (
            Streamed(
                settings,
                self.parameters,
                self._locals,
                device or next(iter(self._locals.values())).device,
                moments=moments,
                bring_all=masters and (device is None or device.type == "cpu"),
            )
            if moments or masters
            else AtOnce(settings, self.parameters, self._locals, first)
        )

    @torch.no_grad()
    def take_gradients(self) -> dict[str, Tensor]:
        """Move gradients from the parameters to the local parts; a parameter that was not used has gradient zero.

        [Note: unused parameters] Whether some rank used a parameter depends on how the batch was cut. "No gradient" would
        therefore make weight decay depend on the plan; zero does not.
        """
        for name, parameter in self.parameters.items():
            part = self._locals[name]
            if parameter.grad is None:
                part.grad = torch.zeros_like(part)
            else:
                part.grad = local(parameter.grad)
                parameter.grad = None
        return {name: part.grad for name, part in self._locals.items() if part.grad is not None}

    @torch.no_grad()
    def set_gradients_aside(self) -> dict[str, Tensor]:
        """Move what `take_gradients` took into host memory, so that another backward neither finds it nor writes over it."""
        aside = {
            name: part.grad.to("cpu", copy=True)
            for name, part in self._locals.items()
            if part.grad is not None
        }
        for part in self._locals.values():
            part.grad = None
        return aside

    @torch.no_grad()
    def put_gradients_back(self, aside: Mapping[str, Tensor]) -> None:
        """Have what `set_gradients_aside` gave again, and no other gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            part = self._locals[name]
            part.grad = aside[name].to(part.device) if name in aside else None

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """What `take_gradients` took, shaped and sharded like the parameters."""
        return {
            name: _like(part.grad, self.parameters[name])
            for name, part in self._locals.items()
            if part.grad is not None
        }

    @torch.no_grad()
    def step(
        self,
        lr: float,
        divide_by: Tensor,
        skip: Tensor,
        *,
        after_first: Callable[[], None] | None = None,
        ready: Ready[str] | None = None,
    ) -> None:
        """Update with gradients divided by `divide_by`, or do nothing where `skip` is 1; no wait for the device.

        Args:
            after_first: called when all updates of `first` are on their way to the device.
            ready: what is left of local parts beside, if `fills_places`.
        """
        if isinstance(self._update, AtOnce):
            self._update.step(lr, divide_by, skip, after_first, ready)
        else:
            self._update.step(lr, divide_by, skip)
        for part in self._locals.values():
            part.grad = None

    @property
    def fills_places(self) -> bool:
        """Whether an update can write what it updates into other places as well."""
        return isinstance(self._update, AtOnce)

    def rebind(self) -> None:
        """Follow local parts that moved: the first forward of a sharded model may lay them out anew."""
        for name, parameter in self.parameters.items():
            part = local(parameter)
            if _place(part) != _place(self._locals[name]):
                self._locals[name].data = part

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Every state tensor by `parameter.kind`, shaped and sharded like its parameter; all zero before the first step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for kind, value in self._update.state_of(name).items():
                found[f"{name}.{kind}"] = _like(value, parameter)
        return found

    def held(self) -> dict[str, list[Tensor]]:
        """This rank's parts of what training keeps, as far as they are there, by kind; nothing is made."""
        grads = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        grads += [part.grad for part in self._locals.values() if part.grad is not None]
        parts = [part.detach() for part in self._locals.values()]
        return {"parameters": parts, "gradients": grads, "optimizer state": self._update.held()}


class AtOnce:
    """One torch optimizer over parts that are all on the device, with its state."""

    def __init__(
        self,
        settings: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        parts: Mapping[str, nn.Parameter],
        first: Collection[nn.Parameter] = (),
    ) -> None:
        self._settings, self._parts = settings, parts
        early = [name for name, parameter in parameters.items() if parameter in first]
        late = [name for name in parameters if name not in early]
        # one torch optimizer for those that come first and one for the others, each with its kernel's tables
        self._updates = [
            (make(settings, parameters, {name: parts[name] for name in names}), Tables())
            for names in (early, late)
            if names
        ]
        self._early = bool(early)
        self._of = {name: self._updates[-1 if name in late else 0][0] for name in parts}
        if settings.name == "sgd":
            # fused SGD takes its momentum from uninitialised memory if its very first step is one that is skipped
            for name in parts:
                self.state_of(name)

    def step(
        self,
        lr: float,
        divide_by: Tensor,
        skip: Tensor,
        after_first: Callable[[], None] | None = None,
        ready: Ready[str] | None = None,
    ) -> None:
        """As `fused.update`, of the gradients that parts have."""
        parts = self._parts
        of_parts: Ready[Tensor] | None = None
        if ready is not None:
            of_parts = Ready(
                {parts[name]: place[: parts[name].numel()] for name, place in ready.places.items()},
                {parts[name]: one for name, one in ready.largest.items()},
            )
        for number, (optimizer, tables) in enumerate(self._updates):
            update(optimizer, lr, divide_by, skip, tables, of_parts)
            if number == 0 and self._early and after_first is not None:
                after_first()

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state of a part, in place."""
        part = self._parts[name]
        state = self._of[name].state[part]
        if not state:
            for kind in kinds(self._settings):
                state[kind] = torch.zeros_like(part)
            if self._settings.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        return {kind: value for kind, value in state.items() if isinstance(value, Tensor)}

    def held(self) -> list[Tensor]:
        """State tensors that are there."""
        states = [state for optimizer, _ in self._updates for state in optimizer.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _place(tensor: Tensor) -> tuple[int, int | torch.SymInt]:
    """What names the memory of a tensor for as long as it is held; a tensor of a simulated world has no address."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A local state tensor as the whole it is a part of."""
    if not isinstance(parameter, DTensor) or (value.dim() == 0 and parameter.dim() > 0):
        return value
    if value.device.type != parameter.device_mesh.device_type:  # from_local would move it out of host memory
        return DTensor(value, parameter._spec, requires_grad=False)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
