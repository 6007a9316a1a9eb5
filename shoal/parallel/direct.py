"""Parameters are gathered where they are used, and gradients are sent from where they lie: `fully_shard` without its copies.

To gather a unit by one collective, `fully_shard` casts its parameters, copies them into one buffer and out of it again when it is
gathered; gradients are copied into another one, in fp32: a tenth of an 8B step on two H200s (benchmarks/notes.md).
Here a rank's part is cast into its own place within the gathered parameter, and one launch gathers all of a unit's in place.
Gradients of 16 bits are exchanged as they are, each rank gets its part from all others, and adds them up in fp32: the sums of
`fully_shard`, half of its bytes. Where a unit's ranks are on several hosts, where a ring sends less than an exchange, and for
gradients of the masters' type, they are reduced and scattered, without copies too.

Sources: torch's FSDP2 (`foreach_all_gather`, `foreach_reduce` and their copies); Megatron-Core's
`reduce_scatter_with_fp32_accumulation`, which exchanges gradients in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal.parallel.gather8 import narrow_weight_of
from shoal.parallel.shard import parameter_groups
from shoal.parallel.sums import cast_into, sum_parts
from shoal.world import World

BACKENDS = ("nccl", "gloo", "fake")  # of which it is known that they gather many tensors at once; not MPI


def send_directly(roots: Iterable[nn.Module], world: World) -> None:
    """Let the sharded modules in `roots` send without copies, in place. Collective."""
    hosts: dict[dist.ProcessGroup, bool] = {}
    found = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    for module in dict.fromkeys(found):  # in one order on all ranks
        for group in parameter_groups(module):
            ranks = group._all_gather_process_group
            if ranks.size() == 1 or _backend(ranks, world.device) not in BACKENDS:
                continue
            if ranks not in hosts:
                hosts[ranks] = world.is_one_host(ranks)
            exchange: Any = Exchange(ranks.size(), one_host=hosts[ranks])
            module.set_custom_reduce_scatter(exchange)
            if all(parameter.fsdp_placement.dim == 0 for parameter in group.fsdp_params):
                group.unshard = Gather(group)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The one that serves a device: a group can have one for each kind."""
    name = dist.get_backend_config(group)
    by_device = dict(part.split(":") for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name)


class Elsewhere(Tensor):
    """Stands for a buffer of `fully_shard` without having its memory: what it would hold lies in `parts`.

    Copies into it are noted, copies out of it are none; torch calls both as operators of its own.
    """

    parts: list[Tensor]
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]

    @staticmethod
    def __new__(
        cls: type[Elsewhere],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        parts: list[Tensor],
    ) -> Elsewhere:
        make: Any = torch.Tensor._make_wrapper_subclass  # torch's way to make a tensor of such a class
        made = make(cls, tuple(shape), dtype=dtype, device=device)
        made.parts = parts
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Tells recorders of memory that this has none of its own."""
        return [], None

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.default:
            return _view(*args)
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            return None
        if func is torch.ops.fsdp.chunk_cat.default:
            tensors, _dim, _count, *out = args
            (out[0] if out else kwargs["out"]).parts.extend(tensors)
            return None
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"torch {torch.__version__} does {func} to a buffer of fully_shard, which shoal does not know; use an older torch"
        )


def _view(whole: Elsewhere, shape: Sequence[int]) -> Elsewhere:
    count, known = whole.numel(), math.prod(size for size in shape if size != -1)
    sizes = [count // known if size == -1 else size for size in shape]
    return Elsewhere(sizes, whole.dtype, whole.device, whole.parts)


class Gather:
    """In place of a unit's `unshard`: the same, into the gathered parameters themselves.

    They are taken from the computing stream's memory when the gather is asked for, which then waits for what computes so far:
    that memory may just have been freed by it. Units are asked for one ahead, so that they are gathered while the last one runs.

    Args:
        group: torch's FSDPParamGroup.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._torchs = group.unshard

    @torch.no_grad()
    def __call__(self, async_op: bool = False) -> None:
        group = self._group
        asked_for_nothing = (
            group._all_gather_result is not None
            or not group.is_sharded
            or (not group.unshard_in_backward and "PRE_BACKWARD" in str(group._training_state))
        )
        if asked_for_nothing or async_op:
            self._torchs(async_op)
            return
        with torch.profiler.record_function(group._with_fqn("FSDP::all_gather")):
            group._all_gather_result = self._gather()

    def _gather(self) -> Any:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

        group, ranks = self._group, self._group._all_gather_process_group
        handle = group.device_handle
        current = handle.current_stream()
        _, stream = group.comm_ctx.get_all_gather_streams(False, group._training_state)
        if any(_has_own_way(parameter) for parameter in group.fsdp_params):
            stream.wait_stream(current)
        with handle.stream(stream):
            sent = [_what_to_send(parameter) for parameter in group.fsdp_params]
        for parameter, parts in zip(group.fsdp_params, sent, strict=True):
            numels, kinds = [part.numel for part in parts], [part.kind for part in parts]
            parameter.init_all_gather_outputs(numels, kinds, ranks.size(), group.device)
            parameter.alloc_all_gather_outputs()
        outputs = [tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs]
        stream.wait_stream(current)
        with handle.stream(stream), _without_versions(outputs):
            _gather_in_place(outputs, [part for parts in sent for part in parts], ranks)
            event = stream.record_event()
        kinds, numels = (
            [[part.kind for part in parts] for parts in sent],
            [[part.numel for part in parts] for parts in sent],
        )
        flat = [numel for each in numels for numel in each]
        whole = Elsewhere((sum(flat) * ranks.size(),), outputs[0].dtype, group.device, [])
        return AllGatherResult(whole, event, None, kinds, numels, flat)


class Sent(NamedTuple):
    """This rank's part of a parameter, before it is in its place."""

    numel: int
    kind: torch.dtype
    """in which it travels"""
    source: Tensor | None = None
    """what is cast into its place"""
    put: Callable[[Tensor], None] | None = None
    """what writes it into its place otherwise"""


def _what_to_send(parameter: Any) -> list[Sent]:
    """Of torch's FSDPParam."""
    weight = narrow_weight_of(parameter)
    if weight is not None:
        return [Sent(weight.cut.numel(), torch.uint8, put=weight.put(parameter.shard_mesh_from_root))]
    if _has_own_way(parameter):
        return [Sent(tensor.numel(), tensor.dtype, tensor) for tensor in parameter.all_gather_inputs]
    data = parameter._sharded_param_data
    return [Sent(data.numel(), parameter.param_dtype or data.dtype, data)]


def _has_own_way(parameter: Any) -> bool:
    """Whether a parameter is not sent as it lies: cast to 8 bits, or from host memory."""
    return parameter.offload_to_cpu or hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")


def _without_versions(outputs: Sequence[Tensor]) -> Any:
    """Autograd has saved gathered parameters, and would take another gather for a change; torch's own gather does the same."""
    counted = tuple(tensor for tensor in outputs if not tensor.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted) if counted else nullcontext()


def _gather_in_place(outputs: Sequence[Tensor], parts: Sequence[Sent], group: dist.ProcessGroup) -> None:
    """Each output becomes all ranks' parts, by one launch."""
    places = [
        output.narrow(0, part.numel * group.rank(), part.numel)
        for output, part in zip(outputs, parts, strict=True)
    ]
    cast = [
        (place, part.source) for place, part in zip(places, parts, strict=True) if part.source is not None
    ]
    cast_into([place for place, _ in cast], [source for _, source in cast])
    for place, part in zip(places, parts, strict=True):
        if part.put is not None:
            part.put(place)
    with _together(group):
        for output, place in zip(outputs, places, strict=True):
            _gather_in_order(output, place, group=group)


_gather_in_order = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_in_order = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _together(group: dist.ProcessGroup, device: torch.device | None = None) -> Any:
    """One launch for all collectives inside, which must be of one kind; exchanges need their device.

    torch has no public name for it (pytorch/pytorch#100949 brought it)."""
    return dist.distributed_c10d._coalescing_manager(group, device)


class Exchange:
    """In place of a unit's reduce-scatter; `fully_shard` asks for its input, copies gradients into it, and asks for its output.

    Args:
        ranks: over which parameters are cut. one_host: they can exchange as fast as they can send along a ring.
    """

    def __init__(self, ranks: int, *, one_host: bool) -> None:
        self._ranks, self._one_host = ranks, one_host
        self._asked = 0  # elements of an input whose output has not been asked for

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (count,) = size
        if self._asked == count * self._ranks:
            self._asked = 0
            return torch.empty(count, dtype=dtype, device=device)
        self._asked = count
        return Elsewhere((count,), dtype, device, [])

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if not isinstance(input_tensor, Elsewhere) or op != dist.ReduceOp.SUM:
            raise NotImplementedError(
                f"torch {torch.__version__} reduces gradients in a way that shoal does not know: {op}"
            )
        whole = [_even(gradient, self._ranks) for gradient in input_tensor.parts]
        parts = output_tensor.split([gradient.numel() // self._ranks for gradient in whole])
        if whole[0].dtype != output_tensor.dtype and self._one_host:
            _exchange(parts, whole, group)
            return
        if whole[0].dtype != output_tensor.dtype:
            wide = [torch.empty_like(gradient, dtype=output_tensor.dtype) for gradient in whole]
            cast_into(wide, whole)
            whole = wide
        with _together(group):
            for part, gradient in zip(parts, whole, strict=True):
                _scatter_in_order(part, gradient, group=group)


def _exchange(parts: Sequence[Tensor], gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Each of `parts` becomes the sum of all ranks' gradients there."""
    ranks, rank, device = group.size(), group.rank(), parts[0].device
    if device.type == "cpu":  # Gloo has no other exchange
        for part, gradient in zip(parts, gradients, strict=True):
            received = torch.empty_like(gradient)
            dist.all_to_all_single(received, gradient, group=group)
            sum_parts(received[: part.numel()], received[part.numel() :], part)
        return
    rest = [
        gradient.new_empty((ranks - 1) * part.numel())
        for part, gradient in zip(parts, gradients, strict=True)
    ]
    nothing = rest[0].new_empty(0)  # what a rank would send itself it has
    with _together(group, device):
        for others, gradient in zip(rest, gradients, strict=True):
            received = list(others.chunk(ranks - 1))
            sent = list(gradient.chunk(ranks))
            sent[rank] = nothing
            dist.all_to_all([*received[:rank], nothing, *received[rank:]], sent, group=group)
    for part, others, gradient in zip(parts, rest, gradients, strict=True):
        sum_parts(gradient.narrow(0, rank * part.numel(), part.numel()), others, part)


def _even(gradient: Tensor, ranks: int) -> Tensor:
    """Its elements, with zeros behind the last row as far as all ranks have equally many rows."""
    rows = gradient.shape[0]
    if rows % ranks == 0:
        return gradient.reshape(-1)
    padded = gradient.new_zeros((-(-rows // ranks) * ranks, *gradient.shape[1:]))
    padded[:rows] = gradient
    return padded.view(-1)
