"""Activations in host memory: what a block keeps for backward goes there while the next block computes, and comes back in time.

The hooks of `torch.autograd.graph.saved_tensors_hooks` see every tensor that a block's forward saves. Large ones are copied out
when the next block begins and let go of when it ends; when backward comes to a block, the block before it is fetched. So some two
blocks' activations are on the device at a time, and those of the block where forward turns into backward never leave it. With
recompute the hooks see what is kept for the second run: the block's input.

[Note: what stays] Parameters and whatever stands for them in forward (gathered, cast or local ones) stay the tensors that they
are: sharding frees and gathers them under their users. So do buffers and the inputs that all blocks share (masks, rotary tables),
which others keep alive anyway; small tensors; tensors with gaps or overlaps; and what is not a plain tensor on the device.

[Note: one copy] What is moved is a range of memory, and not a tensor: views of it that differ in shape alone, and a tensor that
several operations save, are copied once and are one again when they are back.

[Note: lifetimes] Ranges belong to autograd: they are let go of when the operations that saved them are. A call of a block knows
its ranges weakly. Only while a copy runs are both its ends held, until the device's own stream has waited for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal.parallel.host import Lane, Mark
from shoal.simulated import is_simulated
from shoal.tensors import tensors_in

KEPT_BYTES = 1 << 20  # smaller tensors stay: they are many, and a copy costs more than they take


def offload_activations(
    units: Iterable[nn.Module], device: torch.device, *, kept_bytes: int | None = None
) -> None:
    """Keep in host memory what the forwards of blocks save for backward, in place: the last thing that wraps a forward.

    Args:
        kept_bytes: tensors smaller than this stay on the device; left out, 1 MiB.
    """
    traffic = _Traffic(device, KEPT_BYTES if kept_bytes is None else kept_bytes)
    for unit in units:
        unit.forward = _moving(unit, traffic)


def _moving(unit: nn.Module, traffic: _Traffic) -> Callable[..., Any]:
    forward, held = unit.forward, _Held(unit)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = traffic.begin(held, [*args, *kwargs.values()][1:])
        try:
            with saved_tensors_hooks(partial(traffic.pack, call), traffic.unpack):
                return forward(*args, **kwargs)
        finally:
            traffic.end(call)

    return run


class _Range:
    """Memory that a call saved: on the device, in host memory, or on the device again."""

    def __init__(self, call: _Call, source: Tensor) -> None:
        self.call, self.version = call, source._version
        self.source: Tensor | None = source
        self.host: Tensor | None = None
        self.back: Tensor | None = None
        self.changed = False


class _Moved(NamedTuple):
    """A saved tensor as a view of a range."""

    range: _Range
    shape: torch.Size
    stride: tuple[int, ...]


class _Kept(NamedTuple):
    """A saved tensor that stays, and its version: with hooks, torch leaves that check to them."""

    tensor: Tensor
    version: int


class _Call:
    """One forward of a block."""

    def __init__(self, held: _Held, shared: Sequence[Any], previous: _Call | None) -> None:
        self.held, self.shared = held, {_memory(tensor) for tensor in tensors_in(shared)}
        self.previous = weakref.ref(previous) if previous is not None else None
        self.ranges: weakref.WeakValueDictionary[tuple[Any, ...], _Range] = weakref.WeakValueDictionary()
        self.leaving: list[_Range] = []
        self.left, self.arrived = Mark(), Mark()
        self.parameters: set[int] | None = None
        self.in_backward = False

    def stays(self, tensor: Tensor) -> bool:
        if self.parameters is None or self.held.comes_later:
            self.parameters = self.held.memory()  # as they are inside of what wraps the forward
        memory = _memory(tensor)
        return memory in self.parameters or memory in self.shared


class _Held:
    """The memory of what a block holds while it runs."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._names = [
            (module, name)
            for module in unit.modules()
            for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]

    @property
    def comes_later(self) -> bool:
        """Whether parts of the block, its experts, gather their parameters only when they run."""
        return any(
            isinstance(module, FSDPModule) for module in self._unit.modules() if module is not self._unit
        )

    def memory(self) -> set[int]:
        found = (getattr(module, name, None) for module, name in self._names)
        return {_memory(tensor) for tensor in found if isinstance(tensor, Tensor)}


class _Traffic:
    """What is on its way between device and host, for all blocks of a model."""

    def __init__(self, device: torch.device, kept_bytes: int) -> None:
        self._device, self._kept_bytes = device, kept_bytes
        self._out, self._in = Lane(device), Lane(device)
        self._newest: _Call | None = None
        self._leaving: _Call | None = None
        self._coming: tuple[_Call, list[Tensor]] | None = None

    def begin(self, held: _Held, shared: Sequence[Any]) -> _Call:
        """A block's forward begins: what the last one saved begins to leave."""
        self._forget_coming()
        if self._newest is not None and not self._newest.in_backward:
            self._send(self._newest)
        return _Call(held, shared, self._newest)

    def end(self, call: _Call) -> None:
        """A block's forward has ended: the last one's activations are let go of on the device."""
        if self._leaving is not None:
            self._let_go(self._leaving)
        self._leaving, self._newest = None, call

    def pack(self, call: _Call, tensor: Tensor) -> _Moved | _Kept:
        if not self._is_movable(tensor) or call.stays(tensor):
            return _Kept(tensor.detach(), tensor._version)  # itself, it would keep the graph that keeps it
        key = (_memory(tensor), tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version)
        found = call.ranges.get(key)
        if found is None:
            found = _Range(call, tensor.detach().as_strided((tensor.numel(),), (1,)))
            call.ranges[key] = found
        return _Moved(found, tensor.shape, tensor.stride())

    def unpack(self, saved: _Moved | _Kept) -> Tensor:
        if isinstance(saved, _Kept):
            _require_unchanged(saved.tensor._version == saved.version, saved.tensor)
            return saved.tensor
        return self._fetched(saved.range).as_strided(saved.shape, saved.stride)

    def _is_movable(self, tensor: Tensor) -> bool:
        return (
            (type(tensor) is Tensor or is_simulated())
            and tensor.device == self._device
            and tensor.nbytes >= self._kept_bytes
            and not (tensor.is_leaf and tensor.requires_grad)
            and not (tensor.is_conj() or tensor.is_neg())
            and _is_dense(tensor)
        )

    def _send(self, call: _Call) -> None:
        """Begin to copy what a call saved, as far as it is still wanted."""
        call.leaving = [found for found in call.ranges.values() if found.source is not None]
        if not call.leaving:
            return
        with self._out.run():
            for found in call.leaving:
                assert found.source is not None
                found.host = torch.empty(
                    found.source.shape, dtype=found.source.dtype, pin_memory=self._device.type == "cuda"
                )
                found.host.copy_(found.source, non_blocking=True)
        call.left = self._out.mark()
        self._leaving = call

    def _let_go(self, call: _Call) -> None:
        call.left.wait()
        for found in call.leaving:
            assert found.source is not None
            found.changed = found.source._version != found.version
            found.source = None
        call.leaving = []

    def _fetched(self, wanted: _Range) -> Tensor:
        """A range on the device; when the first of a call is wanted, the call before it is fetched, too."""
        call = wanted.call
        if wanted.source is None and wanted.back is None:
            self._fetch(call)
        if not call.in_backward:
            call.in_backward = True
            self._wait_for(call)
            before = call.previous() if call.previous is not None else None
            if before is not None and not before.in_backward:
                self._fetch(before)
        elif wanted.source is None:
            self._wait_for(call)
        found = wanted.source if wanted.source is not None else wanted.back
        assert found is not None
        _require_unchanged(
            not wanted.changed and (wanted.source is None or found._version == wanted.version), found
        )
        return found

    def _fetch(self, call: _Call) -> None:
        """Begin to copy back what a call has in host memory alone."""
        away = [found for found in call.ranges.values() if found.source is None and found.back is None]
        if not away:
            return
        self._forget_coming()
        for found in away:
            assert found.host is not None
            found.back = torch.empty(found.host.shape, dtype=found.host.dtype, device=self._device)
        with self._in.run():
            for found in away:
                assert found.host is not None and found.back is not None
                found.back.copy_(found.host, non_blocking=True)
                found.host = None
        call.arrived = self._in.mark()
        self._coming = (call, [found.back for found in away if found.back is not None])

    def _wait_for(self, call: _Call) -> None:
        call.arrived.wait()
        if self._coming is not None and self._coming[0] is call:
            self._coming = None

    def _forget_coming(self) -> None:
        """Wait for what was fetched and not used, so that its memory can be given back."""
        if self._coming is not None:
            self._wait_for(self._coming[0])


def _memory(tensor: Tensor) -> int:
    """What names the memory of a tensor, and of its views, for as long as there are any."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _require_unchanged(unchanged: bool, tensor: Tensor) -> None:
    if not unchanged:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that a block needs for its gradient was changed in place after it was used; "
            "change a copy of it in the model's forward (x = x + y in place of x += y)"
        )
