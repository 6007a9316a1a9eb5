"""`Tape`: every allocation and release of memory of a simulated step, and everything that it launches, in the order in which they
happen.

Nothing here knows of parallelism: sharding, recompute and the optimizer run their own code on fake tensors, and the tape sees the
storages that come and go. A storage is followed by a weak reference, so that it ends when its last tensor does.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.planner.fake_device import replace
from shoal.planner.launch import (
    NAMESPACES,
    Cost,
    Kind,
    Launch,
    Moment,
    cost_of,
    on_lists,
    parts_of,
    travel_of,
)
from shoal.planner.mode import SimulatedMode
from shoal.planner.streams import Streams
from shoal.planner.trace import Shape, Storage, Trace
from shoal.planner.workspace import MATMULS, blas_workspace_bytes, scratch_bytes

aten: Any = torch.ops.aten
IN_PLACE: dict[Any, Any] = {
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._index_put_impl.default: aten._index_put_impl_.default,
}
"""what gradients of indexing do to a tensor of zeros; while operators are looked at, torch makes a second one"""
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
UNSEEN = 2**63  # nodes that accumulate gradients have a number that no operation has


class Tape(TorchDispatchMode):
    """Records storages while it is entered, inside of a `FakeTensorMode`.

    Args:
        mode: the fake mode; tensors of other modes (torch's own studies of shapes) are not memory.
        capability: of the GPU that is simulated; None for a CPU.
    """

    def __init__(self, mode: SimulatedMode, streams: Streams, capability: tuple[int, int] | None) -> None:
        super().__init__()
        self.trace = Trace()
        self._mode, self._streams, self._capability = mode, streams, capability
        mode.tape = self
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._held: dict[int, list[Tensor]] = {}
        self._handles: set[tuple[bool, int]] = set()
        self._step, self._phase = -1, "setup"
        self._calls: list[
            tuple[int, str]
        ] = []  # (number of the first operation, unit), for backward to look up
        self._unit = ""
        self._behind = ""  # the block that backward is in
        self._fresh: int | None = None
        self._flying: dict[int, Launch] = {}
        """functional collectives by the memory of their results"""
        self._compiled, self._paused, self._muted = False, 0, False
        streams.on_record, streams.on_wait = self._record, self._stream_waits

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # it is not there while Dynamo looks at code, and keeping Dynamo off at each operator takes time
        return False

    # where the step is

    def begin(self, phase: str, step: int) -> None:
        """A phase of a step begins."""
        self._step, self._phase, self._unit = step, phase, ""
        if phase == "forward":
            self._calls = [(0, "")]

    def enter_unit(self, unit: str) -> None:
        """Operations that follow in forward are of a block, or with "" of none."""
        if torch._C._current_graph_task_id() == -1:
            self._unit = unit
            self._calls.append((torch.autograd._get_sequence_nr(), unit))

    def now(self) -> Moment:
        """Where the step is."""
        if self._phase != "forward" or torch._C._current_graph_task_id() == -1:
            return Moment(self._step, self._phase, self._unit)
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else UNSEEN
        if number < UNSEEN:
            self._behind = self._calls[bisect.bisect_right(self._calls, (number, "\uffff")) - 1][1]
        phase = "recompute" if torch.is_grad_enabled() else "backward"
        return Moment(self._step, phase, self._behind)

    @contextmanager
    def paused(self) -> Generator[None]:
        """This mode is off, as Dynamo wants it; tensors are still fake, and storages still end.

        Operators are recorded that run between compiled graphs: see `SimulatedMode`.
        """
        self._paused += 1
        try:
            with _disable_current_modes(), self._mode:
                yield
        finally:
            self._paused -= 1

    @property
    def between_graphs(self) -> bool:
        """Whether code runs now that a compiled function leaves to Python."""
        return self._paused > 0 and not self._compiled and TracingContext.try_get() is None

    @contextmanager
    def resumed(self) -> Generator[None]:
        """Inside of `paused`: operators are recorded again."""
        with self:
            yield

    # what storages are for

    def tell(self, tensor: Tensor | None, kind: str, name: str = "") -> None:
        """Say what the memory of a tensor is for."""
        number = self.number(tensor) if tensor is not None else None
        if number is not None:
            storage = self.trace.storages[number]
            storage.kind, storage.name = kind, name or storage.name

    def number(self, tensor: Tensor) -> int | None:
        """Of a tensor's storage in the trace."""
        found = self._live.get(_plain(tensor).untyped_storage()._cdata)
        return None if found is None else found[0]

    # what is launched

    @contextmanager
    def muted(self) -> Generator[None]:
        """Nothing is recorded; what is allocated meanwhile is never seen."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def add(self, launch: Launch) -> Launch:
        """Something is launched, or waited for."""
        if self._muted:
            return launch
        self.trace.events.append(launch)
        self.trace.moments.append(launch.moment)
        return launch

    def wait(self, on: Launch | None) -> None:
        """The current stream goes on when something has ended."""
        self._stream_waits(self._streams.current.stream_id, on)

    def synchronise(self) -> None:
        """The host goes on when the current stream has done all."""
        self._stream_waits(None, self._record(self._streams.current.stream_id))

    def _record(self, stream: int) -> Launch:
        return self.add(Launch("record", stream, "", self.now()))

    def _stream_waits(self, stream: int | None, on: Launch | None) -> None:
        if on is not None:
            kind = "sync" if stream is None else "wait"
            self.add(Launch(kind, stream or 0, "", self.now(), on=on))

    @contextmanager
    def compiled(self, operator: str) -> Generator[None]:
        """Compiled code is called, and launches what comes."""
        self.add(Launch("call", self._streams.current.stream_id, operator, self.now()))
        before, self._compiled = self._compiled, True
        try:
            yield
        finally:
            self._compiled = before

    def does(
        self, cost: Cost, operator: str, name: str = "", *, follows: bool = False, made: int = -1
    ) -> None:
        """A kernel is launched."""
        launch = Launch(cost.kind, self._streams.current.stream_id, operator, self.now(), name)
        launch.nbytes, launch.flops, launch.dtype, launch.dims = (
            cost.nbytes,
            cost.flops,
            cost.dtype,
            cost.dims,
        )
        launch.compiled, launch.follows, launch.made = self._compiled, follows, made
        launch.times = cost.times
        self.add(launch)

    def _launches(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        if func.namespace in NAMESPACES:
            self._travels(func, args, kwargs, outputs)
        elif on_lists(func, args):
            for place, (first, cost) in enumerate(parts_of(func, args, outputs)):
                self.does(cost, str(func), self._name(first), follows=place > 0)
        else:
            cost = cost_of(func, args, kwargs, outputs)
            if cost is not None:
                made = self.number(outputs[0]) if outputs else None
                self.does(cost, str(func), made=-1 if made is None else made)

    def _travels(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        travel = travel_of(func, args, kwargs, outputs)
        if travel is None:
            return
        current, ranks = self._streams.current.stream_id, travel.ranks
        kind: Kind = "collective"
        stream: int | str = f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
        if travel.operator == "send" or travel.operator == "receive":
            kind, stream = travel.operator, f"{travel.operator} {ranks[0]}"
        if travel.waits:
            stream = current
        else:
            self.add(Launch("wait", stream, "", self.now(), on=self._record(current)))
        launch = self.add(
            Launch(kind, stream, travel.operator, self.now(), nbytes=travel.nbytes, ranks=ranks)
        )
        if func.namespace != "c10d":
            for tensor in outputs:
                self._flying[_plain(tensor).untyped_storage()._cdata] = launch

    def sends(self, operator: str, tensors: Sequence[Tensor], nbytes: int, ranks: tuple[int, ...]) -> None:
        """One launch of collectives that are not called; the current stream waits for it."""
        for number in map(self.number, tensors):
            if number is not None:
                self.trace.storages[number].travels = True
        current = self._streams.current.stream_id
        self.add(Launch("collective", current, operator, self.now(), nbytes=nbytes, ranks=ranks))

    def runs(self, func: Any, args: Any, cost: Cost | None) -> None:
        """An operator runs that is not called: what it does is known."""
        if self._capability is not None:
            self._workspaces(func, args)
        if cost is not None:
            self.does(cost, str(func))

    def allocate(self, like: Tensor, operator: str) -> Tensor:
        """A tensor as an operator would make it, without calling one."""
        return self.place(Shape.of(like), operator, self.now())

    def place(self, shape: Shape, operator: str, now: Moment) -> Tensor:
        """The same at a moment that is said."""
        with no_dispatch():
            meta = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device="meta")
        tensor = FakeTensor(self._mode, meta, shape.device)
        self._follow(tensor.untyped_storage(), tensor, operator, now)
        return tensor

    def _name(self, tensor: Tensor) -> str:
        number = self.number(tensor)
        return "" if number is None else self.trace.storages[number].name

    # memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.sees(func, types, args, kwargs or {}, lambda func, args, kwargs: func(*args, **kwargs))

    def sees(self, func: Any, types: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        """Let an operator run, and record what it does."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(hasattr(kind, "__tensor_flatten__") and kind is not AsyncCollectiveTensor for kind in types):
            return NotImplemented  # it only holds tensors (DTensor, weights in float8): what it does to those is seen
        if func is torch.ops._c10d_functional.wait_tensor.default:
            key = _plain(args[0]).untyped_storage()._cdata
            self._held.pop(key, None)
            if key in self._flying:
                self.wait(self._flying.pop(key))
            return args[0]  # as in fact; the fake operator gives a new tensor
        if kwargs.get("pin_memory"):  # which fake tensors cannot be
            kwargs = {**kwargs, "pin_memory": False}
        if func in IN_PLACE and id(args[0]) == self._fresh:
            func = IN_PLACE[func]
        out = run(func, args, kwargs)
        self._fresh = id(out) if func in ZEROS and torch._C._current_graph_task_id() != -1 else None
        seen = self._paused or active_fake_mode() is self._mode
        if seen and not self._muted and func.namespace not in ("prim", "profiler"):
            self._see(func, args, kwargs, out)
        return out

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        now: Moment | None = None
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live and tensor.device.type != "meta":
                now = now or self.now()
                self._follow(storage, tensor, str(func), now)
        if func.namespace in (*NAMESPACES, "fsdp"):
            self._communicates(func, args, kwargs, outputs)
        elif self._capability is not None:
            self._workspaces(func, args)
        self._launches(func, args, kwargs, outputs)

    def _follow(self, storage: Any, tensor: Tensor, operator: str, now: Moment) -> None:
        size = storage.nbytes()
        number = self._allocate(
            size,
            tensor.device.type,
            operator,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            now,
        )
        key = storage._cdata
        self._live[key] = number, weakref.ref(storage, self._ends(key))

    def _allocate(
        self, size: int, device: str, operator: str, shape: tuple[int, ...], dtype: str, now: Moment
    ) -> int:
        stream = self._streams.current.stream_id if device == "cuda" else 0
        return self.take(Storage(size, device, stream, operator, shape, dtype, now))

    def take(self, storage: Storage) -> int:
        """Memory is allocated, as it says itself; its number."""
        number = len(self.trace.storages)
        self.trace.storages.append(storage)
        self.trace.events.append(number)
        self.trace.moments.append(storage.began)
        return number

    def release(self, number: int, now: Moment) -> None:
        """Memory is freed."""
        self.trace.storages[number].ended = now
        self.trace.events.append(~number)
        self.trace.moments.append(now)

    def _ends(self, key: int) -> Callable[[Any], None]:
        def end(reference: Any) -> None:
            found = self._live.get(key)
            if found is not None and found[1] is reference:
                del self._live[key]
                self.release(found[0], self.now())

        return end

    def _resized(self, storage: Any) -> None:
        """Sharding frees and takes memory of gathered parameters by changing the size of their storages."""
        found = self._live.get(storage._cdata)
        if found is None:
            return
        old = self.trace.storages[found[0]]
        if old.nbytes == storage.nbytes():
            return
        self.release(found[0], self.now())
        number = self._allocate(storage.nbytes(), old.device, old.operator, old.shape, old.dtype, self.now())
        self.trace.storages[number].kind, self.trace.storages[number].name = "gathered", old.name
        self._live[storage._cdata] = number, found[1]

    def _communicates(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """Marks what travels; a functional collective's inputs are held until it is waited for."""
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        for tensor in (*inputs, *outputs):
            number = self.number(tensor)
            if number is not None:
                self.trace.storages[number].travels = True
        if func.namespace == "_c10d_functional":
            for tensor in outputs:
                self._held[tensor.untyped_storage()._cdata] = inputs

    def _workspaces(self, func: Any, args: Any) -> None:
        packet = func._overloadpacket
        if packet in MATMULS and args[0].device.type == "cuda":
            # torch has a handle for each thread, and backward runs in one of its own
            handle = torch._C._current_graph_task_id() != -1, self._streams.current.stream_id
            if handle not in self._handles:
                self._handles.add(handle)
                size = blas_workspace_bytes(self._capability or (0, 0))
                self._scratch(size, "cuBLAS")
        sizes = scratch_bytes(func, args)
        for number in [self._scratch(size, str(func)) for size in sizes]:
            self.release(number, self.now())

    def _scratch(self, size: int, operator: str) -> int:
        number = self._allocate(size, "cuda", operator, (size,), "uint8", self.now())
        self.trace.storages[number].kind = "workspace"
        return number

    def see_sizes(self, undo: ExitStack) -> None:
        """See changes of storages' sizes, which are no operators, until `undo` is closed."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        replace(undo, torch.UntypedStorage, "resize_", resize_)


def _plain(tensor: Tensor) -> Tensor:
    """This rank's tensor under a DTensor, or under one that waits for a collective when it is used."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return tensor.elem  # pyrefly: ignore[missing-attribute]
    return tensor
