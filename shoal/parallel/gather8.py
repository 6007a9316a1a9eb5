"""Weights that are multiplied in float8 are gathered in float8: half the bytes of bf16, cast once and where they lie cut.

The scale of a weight is of its largest element over all ranks: one reduction for all weights, at the first gather of a forward,
or of a pipeline's step (what writes weights is not always counted in their versions). Masters, gradients and what is saved are as
without.

[Note: hooks on a tensor] `fully_shard` asks the local tensor of a parameter how it wants to be gathered, for which torchao
makes parameters a subclass of Tensor. Everything that reads masters (optimizers, checkpoints, hashes) would meet that subclass;
here the two hooks are attributes of the plain tensor. They know of what is around it weakly: Python's collector does not look
into tensors that C++ holds as well, and would never free a model that they refer to.

Sources: torch's extension of FSDP2's all-gather (`fsdp_pre_all_gather`, pytorch/pytorch#122908), torchao.float8.fsdp_utils.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shoal.parallel.pipeline import Pipeline
from shoal.parallel.shard import sharded_parameters
from shoal.simulated import is_simulated

SMALLEST = 1e-12  # of a largest element: the scale of a weight that is 0 everywhere stays finite; torchao's


def gather_in_float8(model: nn.Module, pipeline: Pipeline | None = None) -> None:
    """Have the weights of `model`'s float8 linears gathered in float8, in place; one scale a tensor. They must have memory.

    Weights that are not cut along dim 0, or that another module has too, are gathered in bf16, as without.

    Args:
        pipeline: whose stages are called in place of the model.
    """
    from torchao.float8.float8_linear import Float8Linear

    _make_zeros()
    scales = Scales()
    for module in model.modules():
        for sharded in sharded_parameters(module) if isinstance(module, FSDPModule) else ():
            owner = sharded._module_info
            owners = [owner.module, *owner.shared_modules]
            is_weight = (
                all(isinstance(each, Float8Linear) for each in owners) and owner.param_name == "weight"
            )
            if is_weight and sharded.fsdp_placement.dim == 0:
                scales.weights.append(_Weight(sharded, owner.module, scales))
    if pipeline is not None:  # some schedules gather before any stage's forward
        pipeline.before_step.append(scales.forget)
    else:  # before `fully_shard`'s own hook, which may gather
        model.register_forward_pre_hook(scales.forget, prepend=True)


def _make_zeros() -> None:
    """Teach torchao's weights `zeros_like`, which torch 2.13 calls for the gradient of one that was not used."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    FLOAT8_OPS_TABLE.setdefault(torch.ops.aten.zeros_like.default, _zeros_like)


def _zeros_like(_operator: Any, args: tuple[Any, ...], _kwargs: Any = None) -> Tensor:
    whole = args[0]
    return torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)


@torch.library.custom_op("shoal::narrowed", mutates_args=())
def narrowed(matrix: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """`matrix` times `scale` (one element) in a type of 8 bits: too large becomes the largest, never infinite.

    Example:
        >>> narrowed(torch.tensor([1.0, 900.0]), torch.tensor(1.0), torch.float8_e4m3fn).tolist()
        [1.0, 448.0]
    """
    if matrix.is_cuda and kind == torch.float8_e4m3fn:
        from shoal.parallel.gather8_kernel import launch

        found = torch.empty(matrix.shape, dtype=kind, device=matrix.device)
        launch(matrix, scale, found)
        return found
    most = torch.finfo(kind).max
    return (matrix * scale).clamp(-most, most).to(kind)


@narrowed.register_fake
def _(matrix: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    return torch.empty(matrix.shape, dtype=kind, device=matrix.device)


def narrow_into(target: Tensor, matrix: Tensor, scale: Tensor) -> None:
    """`target` becomes what `narrowed` gives in its type. An operator takes the host longer than the kernel takes a GPU."""
    if target.is_cuda and target.dtype == torch.float8_e4m3fn and not is_simulated():
        from shoal.parallel.gather8_kernel import launch

        launch(matrix, scale, target)
        return
    target.copy_(narrowed(matrix, scale, target.dtype))


def narrow_weight_of(sharded: Any) -> _Weight | None:
    """The weight that is gathered in float8 by torch's FSDPParam, if it is one."""
    hook = getattr(sharded._sharded_local_tensor, "fsdp_pre_all_gather", None)
    hooks = getattr(hook, "__self__", None)
    return hooks.weight() if isinstance(hooks, _Hooks) else None


class Scales:
    """Of all weights of a model that are gathered in float8."""

    def __init__(self) -> None:
        self.weights: list[_Weight] = []
        self.found = False
        """`largest` has been found already"""
        self._known: list[Tensor] = []
        self._largest: Tensor | None = None

    def forget(self, *_of_hook: Any) -> None:
        self._known = []

    @torch.no_grad()
    def take(self, mesh: DeviceMesh) -> list[Tensor]:
        """The scale of each weight, of what it was at the beginning of a forward. Collective over the ranks that cut it."""
        if self._known:
            return self._known
        for weight in self.weights:
            weight.require_hooks()
        self.find()
        self.found = False
        largest = self.largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        # divided in fp64, as torchao does it
        most = torch.finfo(self.weights[0].kind).max
        self._known = list((most / largest.double().clamp(min=SMALLEST)).float().unbind())
        return self._known

    @property
    def largest(self) -> Tensor:
        """(weights,): the largest magnitude of this rank's part of each."""
        if self._largest is None:
            cut = self.weights[0].cut
            self._largest = torch.zeros(len(self.weights), dtype=cut.dtype, device=cut.device)
        return self._largest

    @torch.no_grad()
    def find(self) -> None:
        """Fill `largest`, if nobody has since they were last taken."""
        if not self.found:
            cut = [weight.cut for weight in self.weights]
            self.largest.copy_(torch.stack(torch._foreach_norm(cut, float("inf"))))
        self.found = True


class _Hooks(NamedTuple):
    """What `fully_shard` asks of a master."""

    weight: weakref.ref[_Weight]

    def before(self, mesh: DeviceMesh) -> Any:
        return self._held.before(mesh)

    def after(self, *args: Any, **kwargs: Any) -> Any:
        return self._held.after(*args, **kwargs)

    @property
    def _held(self) -> _Weight:
        weight = self.weight()
        if weight is None:
            raise RuntimeError("a float8 weight outlived the model that it was of")
        return weight


class _Weight:
    """How one weight is gathered. What torch keeps of it has no public name."""

    def __init__(self, sharded: Any, linear: Any, scales: Scales) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData

        self.sharded, self.scales, self.number = sharded, scales, len(scales.weights)
        self.kind: torch.dtype = linear.config.cast_config_weight.target_dtype
        self.products = linear.linear_mm_config
        sharded._extensions_data = ExtensionsData()
        hooks = _Hooks(weakref.ref(self))
        self.master.fsdp_pre_all_gather = hooks.before
        self.master.fsdp_post_all_gather = hooks.after

    @property
    def master(self) -> Any:
        """This rank's part, where optimizers write."""
        return self.sharded._sharded_local_tensor

    @property
    def parameter(self) -> nn.Parameter:
        """As the model has it now."""
        owner = self.sharded._module_info
        return getattr(owner.module, owner.param_name)

    @property
    def cut(self) -> Tensor:
        """This rank's part with the rows that make all parts equally long: zeros, after the last rank's."""
        return self.sharded._sharded_param_data.view(self.sharded.padded_sharded_param_size)

    def require_hooks(self) -> None:
        """A tensor that took the master's place has none, and would be gathered in bf16 into what float8 left."""
        if not hasattr(self.master, "fsdp_pre_all_gather"):
            raise RuntimeError(
                f"the memory of {self.sharded._param_fqn} was replaced after parallelize, which float8 does not take; "
                "write new values into it (copy_)"
            )

    @torch.no_grad()
    def before(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What is gathered, as bytes: Gloo has no float8."""
        scale = self.scales.take(mesh)[self.number]
        return (narrowed(self.cut, scale, self.kind).view(torch.uint8),), (scale,)

    def put(self, mesh: DeviceMesh) -> Callable[[Tensor], None]:
        """As `before`, by what writes it into its place, some bytes of the gathered weight."""
        scale, cut = self.scales.take(mesh)[self.number], self.cut
        self.sharded._extensions_data.all_gather_metadata = (scale,)
        self.sharded._extensions_data.all_gather_input_sizes = [cut.size()]
        return lambda place: narrow_into(place.view(self.kind).view(cut.shape), cut, scale)

    def after(
        self,
        gathered: tuple[Tensor, ...],
        scales: tuple[Tensor, ...],
        outwardly: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole weight as torchao's linears take it; `out` is that of the last time, whose memory was filled again."""
        from torchao.float8 import float8_training_tensor as torchao

        ((data,), (scale,)) = gathered, scales
        if out is not None:
            out._scale = scale
            return None
        numbers = data.view(self.kind)
        make: Any = torchao.Float8TrainingTensor
        role = torchao.GemmInputRole.WEIGHT
        return make(numbers, scale, outwardly, self.products, gemm_input_role=role), (data,)
