"""Parameters are gathered where they are used, and gradients are sent from where they lie: `fully_shard` without its copies.

To gather a unit by one collective, `fully_shard` casts its parameters, copies them into one buffer and out of it again when it is
gathered; gradients are copied into another one, in fp32: a tenth of an 8B step on two H200s (benchmarks/notes.md).
Here a rank's part is cast into its own place within the gathered parameter, and one launch gathers all of a unit's in place.
Gradients: see `exchange`. Between GPUs that reach each other's memory nothing is launched: see `peers`. Numbers are those of
`fully_shard`.

[Note: filled places] Where parameters are kept gathered in shared memory, an update can write what a rank sends of them next into
its place as well: then nothing is cast when that is gathered. It holds for one gather, and for weights that nobody writes in
between: `Step` is told so (`ahead`).

Source: torch's FSDP2 (`foreach_all_gather` and its copies, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal.parallel.exchange import Exchange, gather_many
from shoal.parallel.gather8 import narrow_weight_of
from shoal.parallel.peers import Peers, Shared
from shoal.parallel.reach import find_peers
from shoal.parallel.shard import groups_of, is_gathered, parameter_groups, parameters_of
from shoal.parallel.sums import cast_into
from shoal.plan import Plan
from shoal.world import World


def send_directly(roots: Iterable[nn.Module], plan: Plan, world: World) -> list[Exchange]:
    """Let the sharded modules in `roots` send without copies, in place; returns what sends gradients. Collective.

    A unit that has a parameter cut along a later dim than the first is gathered as `fully_shard` does it.
    """
    sending: list[Exchange] = []
    hosts: dict[dist.ProcessGroup, bool] = {}
    peers: dict[dist.ProcessGroup, Peers | None] = {}
    found = [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]
    for module in dict.fromkeys(found):  # in one order on all ranks
        for group in parameter_groups(module):
            ranks = group._all_gather_process_group
            if ranks.size() == 1 or not _is_known(_backend(ranks, world.device), world.device):
                continue
            if ranks not in hosts:
                hosts[ranks] = world.is_one_host(ranks)
                peers[ranks] = find_peers(ranks, world, plan.copy_engines)
            of_masters_type = group.mp_policy.param_dtype in (None, group.mp_policy.reduce_dtype)
            if hosts[ranks] or of_masters_type:
                sending.append(Exchange(ranks.size(), partial(parameters_of, group), peers[ranks]))
                module.set_custom_reduce_scatter(cast(Any, sending[-1]))
            if all(parameter.fsdp_placement.dim == 0 for parameter in group.fsdp_params):
                Gather(group, peers[ranks], kept=plan.zero_stage in (1, 2))
    return sending


def gathered_first(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that are gathered before a forward of `model` begins, where that can be asked for ahead; else none.

    It cannot where `fully_shard` gathers, whose copies would not wait for what computes, nor what is cast to 8 bits, by a scale
    that is found in the forward.
    """
    groups = groups_of_root(model)
    direct = all(isinstance(getattr(group.unshard, "__self__", None), Gather) for group in groups)
    if not direct or any(_has_own_way(parameter) for group in groups for parameter in group.fsdp_params):
        return set()
    return {parameter for group in groups for parameter in parameters_of(group)}


def gathers_of(model: nn.Module) -> list[Gather]:
    """What gathers the units of a model in place, in one order on all ranks."""
    found = [getattr(group.unshard, "__self__", None) for group in groups_of(model)]
    return [gather for gather in found if isinstance(gather, Gather)]


def gather_ahead(model: nn.Module) -> None:
    """Begin to gather what a forward of `model` needs first, as it is now; `reshard` gives it up."""
    for group in groups_of_root(model):
        group._prefetch_unshard(group, "forward")  # as torch gathers one unit while another runs


def gather_first(model: nn.Module) -> None:
    """What a forward of `model` needs first is gathered when the current stream comes here; see `stays`."""
    for group in groups_of_root(model):
        group.unshard()
        group.wait_for_unshard()


def stays(model: nn.Module) -> bool:
    """Whether what a forward of `model` needs first is always gathered into the same memory."""
    gathers = [group.unshard.__self__ for group in groups_of_root(model)]
    return bool(gathers) and all(isinstance(each, Gather) and each.shared is not None for each in gathers)


def groups_of_root(model: nn.Module) -> list[Any]:
    """What a forward of `model` gathers first: torch's groups of parameters that no unit inside has."""
    return parameter_groups(model) if isinstance(model, FSDPModule) else []


def _is_known(backend: str, device: torch.device) -> bool:
    """Whether a backend is known to gather and exchange many tensors at once: MPI does not, nor does Gloo on GPUs."""
    return backend in ("nccl", "fake") or (backend == "gloo" and device.type == "cpu")


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The one that serves a device: a group can have one for each kind."""
    name = dist.get_backend_config(group)
    by_device = dict(part.split(":") for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name)


class Gather:
    """Takes the place of a unit's `unshard` and `wait_for_unshard`: the same, into the gathered parameters themselves.

    They are taken from the computing stream's memory when the gather is asked for, which then waits for what computes so far:
    that memory may just have been freed by it. Units are asked for one ahead, so that they are gathered while the last one runs.

    Args:
        group: torch's FSDPParamGroup. For what is read of it there are no public names.
        peers: whose memory is read, where that can be.
        kept: gathered parameters stay from a forward to its backward, so that they may as well have memory of their own.
    """

    def __init__(self, group: Any, peers: Peers | None = None, *, kept: bool = False) -> None:
        self.group, self.peers, self._keeps = group, peers, kept and peers is not None
        self.shared: Shared | None = None
        """what has the gathered parameters, where they have memory of their own; from the first gather on"""
        self.filled = False
        """this rank's places have what is to be gathered next"""
        self._torchs = group.unshard, group.wait_for_unshard, group.finalize_backward
        self._outputs: list[Tensor] = []
        self._places: list[Tensor] = []
        """this rank's parts of them"""
        self._result: Any = None
        """of the last gather of this kind"""
        group.unshard, group.wait_for_unshard, group.finalize_backward = self.begin, self.end, self.finish

    @torch.no_grad()
    def begin(self, async_op: bool = False) -> None:
        group = self.group
        asked_for_nothing = (
            group._all_gather_result is not None
            or not group.is_sharded
            or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD")
        )
        if asked_for_nothing or async_op:
            self._torchs[0](async_op)
            return
        with torch.profiler.record_function(group._with_fqn("FSDP::all_gather")):
            event = self._gather()
        group._all_gather_result = self._result = _under_way(event, self._outputs[0])

    @property
    def _is_under_way(self) -> bool:
        return self._result is not None and self.group._all_gather_result is self._result

    def end(self) -> None:
        group = self.group
        if not self._is_under_way:
            self._torchs[1]()
            return
        if self._result.all_gather_event is not None:  # a CPU has none
            group.device_handle.current_stream().wait_event(self._result.all_gather_event)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()
        self._result = group._all_gather_result = None

    def finish(self) -> None:
        """After a backward, in place of `finalize_backward`: what was gathered ahead and not used is freed."""
        unused = self._is_under_way
        self._torchs[2]()
        if unused and self.group.is_sharded:
            for parameter in self.group.fsdp_params:
                parameter.free_unsharded_param()

    def _gather(self) -> Any:
        group, handle = self.group, self.group.device_handle
        current = handle.current_stream()
        _, stream = group.comm_ctx.get_all_gather_streams(False, group._training_state)
        if any(_has_own_way(parameter) for parameter in group.fsdp_params):
            stream.wait_stream(current)
        with handle.stream(stream):
            sent = [_what_to_send(parameter) for parameter in group.fsdp_params]
        self._allocate(sent)
        stream.wait_stream(current)
        parts = [part for of_one in sent for part in of_one]
        with handle.stream(stream), _without_versions(self._outputs):
            if self.shared is not None:
                if not self.filled:
                    self.shared.wait_to_write()
                    _fill(self._places, parts)
                self.filled = False
                self.shared.gather()
            else:
                _fill(self._places, parts)
                self._exchange()
            return stream.record_event()

    def _exchange(self) -> None:
        if self.peers is not None:
            self.peers.gather(self._outputs, self._places)
        else:
            gather_many(self._outputs, self._places, self.group._all_gather_process_group)

    @torch.no_grad()
    def fill(self) -> None:
        """Have this rank's places filled, by the current stream, which comes after earlier gathers. Collective."""
        if self.shared is None or self.filled or is_gathered(self.group):
            return
        _, stream = self.group.comm_ctx.get_all_gather_streams(False, self.group._training_state)
        self.group.device_handle.current_stream().wait_stream(stream)
        self.shared.wait_to_write()
        with _without_versions(self._outputs):
            _fill(self._places, [part for p in self.group.fsdp_params for part in _what_to_send(p)])
        self.filled = True

    def forget(self) -> None:
        """What was found of weights ahead is of no use: they are written."""
        self.filled = False
        for parameter in self.group.fsdp_params:
            if (weight := narrow_weight_of(parameter)) is not None:
                weight.scales.found = False

    def places(self) -> dict[nn.Parameter, Tensor]:
        """Where an update may write this rank's part of each parameter; nothing where parts are not sent as they lie."""
        if self.shared is None or any(map(_has_own_way, self.group.fsdp_params)):
            return {}
        return dict(zip(parameters_of(self.group), self._places, strict=True))

    def _allocate(self, sent: Sequence[Sequence[Sent]]) -> None:
        """Memory of gathered parameters, whose tensors are made once."""
        group, ranks = self.group, self.group._all_gather_process_group
        if self._keeps and self.shared is None:
            self._share(sent)
        for parameter, parts in zip(group.fsdp_params, sent, strict=True):
            if not parameter.all_gather_outputs:
                sizes, kinds = [part.numel for part in parts], [part.kind for part in parts]
                parameter.init_all_gather_outputs(sizes, kinds, ranks.size(), group.device)
            parameter.alloc_all_gather_outputs()
        outputs = [tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs]
        if [id(tensor) for tensor in outputs] != [id(tensor) for tensor in self._outputs]:
            numels = [tensor.numel() // ranks.size() for tensor in outputs]
            self._outputs = outputs
            self._places = [
                tensor.narrow(0, numel * ranks.rank(), numel)
                for tensor, numel in zip(outputs, numels, strict=True)
            ]

    def _share(self, sent: Sequence[Sequence[Sent]]) -> None:
        """Give gathered parameters memory that other ranks read, and that stays: freed and taken again, it would move."""
        parameters, peers = self.group.fsdp_params, self.peers
        if peers is None or any(parameter.all_gather_outputs for parameter in parameters):
            self._keeps = False  # torch gathered first, asynchronously
            return
        parts = [part for of_one in sent for part in of_one]
        self.shared = peers.share([part.numel for part in parts], [part.kind for part in parts])
        tensors = iter(self.shared.tensors)
        for parameter, of_one in zip(parameters, sent, strict=True):
            parameter.all_gather_outputs = [next(tensors) for _ in of_one]
            parameter.free_unsharded_param = _keep


def _keep() -> None:
    """In place of what frees."""


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
    if not _has_own_way(parameter):
        data = parameter._sharded_param_data
        return [Sent(data.numel(), parameter.param_dtype or data.dtype, data)]
    weight = narrow_weight_of(parameter)
    if weight is not None:
        return [Sent(weight.cut.numel(), torch.uint8, put=weight.put(parameter.shard_mesh_from_root))]
    return [Sent(tensor.numel(), tensor.dtype, tensor) for tensor in parameter.all_gather_inputs]


def _has_own_way(parameter: Any) -> bool:
    """Whether a parameter is not sent as it lies: cast to 8 bits, or from host memory."""
    return parameter.offload_to_cpu or hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")


def _fill(places: Sequence[Tensor], parts: Sequence[Sent]) -> None:
    both = list(zip(places, parts, strict=True))
    cast = [(place, part.source) for place, part in both if part.source is not None]
    cast_into([place for place, _ in cast], [source for _, source in cast])
    for place, part in both:
        if part.put is not None:
            part.put(place)


def _without_versions(outputs: Sequence[Tensor]) -> Any:
    """Autograd has saved gathered parameters, and would take another gather for a change; torch's own gather does the same."""
    counted = tuple(tensor for tensor in outputs if not tensor.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted) if counted else nullcontext()


def _under_way(event: Any, like: Tensor) -> Any:
    """What torch waits for where a gather is not used after all."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    return AllGatherResult(like.new_empty(0), event, None, [], [], [])
