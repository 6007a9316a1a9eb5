"""The tensor axis: linears cut by outputs (column) and inputs (row), vocabulary cut in embedding and head, sequence parallel.

Parameters are `DTensor`s on the tensor axis of the mesh, so that sharding, checkpoints and hashes see whole ones. What runs are
plain local tensors and one collective at the entry and exit of a region: dispatch through `DTensor` binds a step to the host
(an 8B model on 4 H100s: 1,106 ms for 405 ms of GPU work).

[Note: gradients on the tensor axis] A parameter that is cut gets the gradient of its part. One that is not is used by each rank
on its own part of the sequence or of the heads, so its gradient is summed over the axis. Where all ranks compute the same from
the same it must not be.

Sources: Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198) for sequence parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shoal.layout import Layout
from shoal.parallel.collectives import all_reduce, gather, gather_equal, scatter_sum, sum_gradient, sum_over
from shoal.parallel.layout import modules_named
from shoal.parallel.shard import is_cut
from shoal.plan import Plan

Use = Callable[[Tensor], Tensor]
"""From a parameter to the local tensor that a module computes with."""


def apply_tensor(model: nn.Module, plan: Plan, mesh: DeviceMesh, layout: Layout) -> nn.Module:
    """Cut a model over the tensor axis, in place; its forward then returns logits as a `DTensor` cut by vocabulary.

    Raises:
        ValueError: the layout names modules that are not there or are of another kind, or dims that the degree does not divide
            (those it counts are checked by `require_divisible` before).
    """
    axis = mesh["tensor"]
    group = axis.get_group()
    cut = _Cut(model, layout, axis)
    for path, module in modules_named(model, layout.column).items():
        cut.column(path, _linear(path, module))
    for path, module in modules_named(model, layout.grouped).items():
        cut.grouped(path, _linear(path, module))
    for path, module in modules_named(model, layout.row).items():
        cut.row(path, _linear(path, module))
    for path, module in modules_named(model, layout.embedding).items():
        cut.embedding(path, module)
    for path, module in modules_named(model, layout.head).items():
        cut.column(path, _linear(path, module))
    for module in modules_named(model, layout.region).values():
        module.forward = _entered(module.forward, layout.sequence_dim, group)
    for module in modules_named(model, layout.head).values():
        module.forward = _logits(_entered(module.forward, layout.sequence_dim, group), axis)
    cut.rest()
    return model


def require_divisible(layout: Layout, plan: Plan) -> None:
    """Refuse a degree that does not divide what it must.

    Raises:
        ValueError: naming the count and the degrees that would work.
    """
    for name, count in layout.counts.items():
        if count % plan.tensor:
            works = [degree for degree in range(1, count + 1) if count % degree == 0]
            raise ValueError(
                f"plan.tensor = {plan.tensor} does not divide {name} = {count}; these do: {works[:16]}"
            )
    if layout.grouped and max(layout.groups, plan.tensor) % min(layout.groups, plan.tensor):
        raise ValueError(
            f"plan.tensor = {plan.tensor} and {layout.groups} key/value heads: one must divide the other"
        )


class _Cut:
    """Turns a model's parameters into parts, and remembers how modules are to use them."""

    def __init__(self, model: nn.Module, layout: Layout, axis: DeviceMesh) -> None:
        self.model, self.layout, self.axis = model, layout, axis
        self.group = axis.get_group()
        self.parts: dict[nn.Parameter, nn.Parameter] = {}

    def column(self, path: str, linear: Any) -> None:
        self._cut(linear, "weight", 0)
        self._cut(linear, "bias", 0)

    def row(self, path: str, linear: Any) -> None:
        self._cut(linear, "weight", 1)
        linear.forward = _row_forward(linear, self.layout.sequence_dim, self.group)
        if linear.bias is not None:  # added after the sum: to a part of the sequence, or by all alike
            self._whole(linear, "bias", differs=self.layout.sequence_dim is not None)

    def grouped(self, path: str, linear: nn.Linear) -> None:
        if self.layout.groups % self.group.size() == 0:
            self.column(path, linear)
            return
        width = linear.out_features // self.layout.groups
        first = self.group.rank() * self.layout.groups // self.group.size() * width
        for name in ("weight", "bias"):
            if getattr(linear, name) is not None:
                self._whole(linear, name, differs=True, rows=slice(first, first + width))

    def embedding(self, path: str, module: Any) -> None:
        if not isinstance(module, nn.Embedding):
            raise ValueError(
                f"layout: embedding = {path!r} is {type(module).__name__}; expected nn.Embedding"
            )
        self._cut(module, "weight", 0)
        replaced: Any = module
        replaced.forward = _embedding_forward(module, self.layout.sequence_dim, self.group)

    def rest(self) -> None:
        """Every other parameter is on all ranks whole."""
        regions = set(modules_named(self.model, self.layout.region).values())
        inside = {module for region in regions for module in region.modules()}
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if name not in module.__dict__.get("_shoal_uses", {}) and parameter.is_floating_point():
                    self._whole(
                        module, name, differs=self.layout.sequence_dim is not None or module in inside
                    )

    def _cut(self, module: nn.Module, name: str, dim: int) -> None:
        parameter = getattr(module, name)
        if parameter is None:
            return
        if parameter.shape[dim] % self.group.size():
            raise ValueError(
                f"plan.tensor = {self.group.size()} does not divide dim {dim} of {type(module).__name__}.{name}, which is "
                f"{parameter.shape[dim]} long"
            )
        self._replace(module, name, Shard(dim))
        use_as(module, name, local_part)

    def _whole(self, module: nn.Module, name: str, *, differs: bool, rows: slice | None = None) -> None:
        self._replace(module, name, Replicate())
        use_as(module, name, _use_whole(self.group if differs else None, rows))

    def _replace(self, module: nn.Module, name: str, placement: Shard | Replicate) -> None:
        parameter = getattr(module, name)
        if isinstance(parameter, DTensor) or not is_cut(parameter):
            return
        if parameter not in self.parts:  # a tied parameter stays one
            part = distribute_tensor(parameter.detach(), self.axis, [placement], src_data_rank=None)
            self.parts[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.register_parameter(name, self.parts[parameter])


def use_as(module: nn.Module, name: str, use: Use) -> None:
    """Say how a module is to use a parameter while `local_parameters` lasts."""
    uses: dict[str, Use] = module.__dict__.setdefault("_shoal_uses", {})
    uses[name] = use


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter; gradients flow."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _use_whole(group: dist.ProcessGroup | None, rows: slice | None) -> Use:
    def use(parameter: Tensor) -> Tensor:
        local = local_part(parameter)
        if group is not None and parameter.requires_grad:
            local = sum_gradient(local, group)
        return local if rows is None else local[rows]

    return use


@contextmanager
def local_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, `modules` hold local tensors in place of the parameters of the tensor axis."""
    held: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in modules:
            for name, use in module.__dict__.get("_shoal_uses", {}).items():
                parameter = module._parameters.get(name)
                if parameter is not None:
                    del module._parameters[name]
                    object.__setattr__(module, name, use(parameter))
                    held.append((module, name, parameter))
        yield
    finally:
        for module, name, parameter in held:
            object.__delattr__(module, name)
            module._parameters[name] = parameter  # pyrefly: ignore[unsupported-operation]


def with_local_parameters(forward: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """`forward`, run with local tensors in place of the parameters that `modules` hold directly."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(modules):
            return forward(*args, **kwargs)

    return run


def _linear(path: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise ValueError(f"layout: {path!r} is {type(module).__name__}; column and row modules are nn.Linear")
    return module


def _entered(
    forward: Callable[..., Any], sequence_dim: int | None, group: dist.ProcessGroup
) -> Callable[..., Any]:
    """A region's forward, whose first argument becomes whole on every rank, whether it is given by place or by name."""
    name = next(iter(inspect.signature(forward).parameters))

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop(name)
        whole = sum_gradient(x, group) if sequence_dim is None else gather(x, sequence_dim, group)
        return forward(whole, *args[1:], **kwargs)

    return run


def _left(x: Tensor, sequence_dim: int | None, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks with which a region ends: whole, or this rank's part of the sequence."""
    return sum_over(x, group) if sequence_dim is None else scatter_sum(x, sequence_dim, group)


def _row_forward(
    linear: nn.Linear, sequence_dim: int | None, group: dist.ProcessGroup
) -> Callable[[Tensor], Tensor]:
    if linear.bias is None:
        multiply = linear.forward
    elif type(linear) is nn.Linear:
        multiply = partial(_multiply, linear)
    else:
        raise ValueError(
            f"{type(linear).__name__} adds a bias to its product, which is a sum over the tensor axis: the two cannot be told "
            "apart; use plan.tensor = 1, or another train.precision"
        )

    def forward(input: Tensor) -> Tensor:
        summed = _left(multiply(input), sequence_dim, group)
        return summed if linear.bias is None else summed + linear.bias

    return forward


def _multiply(linear: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, linear.weight)


def _embedding_forward(
    embedding: nn.Embedding, sequence_dim: int | None, group: dist.ProcessGroup
) -> Callable[[Tensor], Tensor]:
    rows = embedding.num_embeddings // group.size()
    first = group.rank() * rows
    padding = None if embedding.padding_idx is None else embedding.padding_idx - first
    padding = padding if padding is not None and 0 <= padding < rows else None  # a row without gradient

    def forward(input: Tensor) -> Tensor:
        local = input - first
        absent = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(absent, 0), embedding.weight, padding)
        return _left(found.masked_fill(absent[..., None], 0.0), sequence_dim, group)

    return forward


def _logits(forward: Callable[..., Tensor], axis: DeviceMesh) -> Callable[..., DTensor]:
    """A head's forward, whose logits say that they are a part of the vocabulary."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> DTensor:
        local = forward(*args, **kwargs)
        return DTensor.from_local(local, axis, [Shard(local.dim() - 1)], run_check=False)

    return run


def whole_output(output: Any) -> Any:
    """An output whose parts of the vocabulary are gathered, for an objective that wants it whole."""
    if isinstance(output, DTensor):
        return _gathered(output)
    return output


def _gathered(output: DTensor) -> Tensor:
    return gather_equal(output.to_local(), output.dim() - 1, output.device_mesh.get_group())


def cross_entropy_sum(logits: Tensor, labels: Tensor, group: dist.ProcessGroup, ignore: int = -100) -> Tensor:
    """Sum of cross-entropies of logits (N, V / ranks), cut by vocabulary, and labels (N,); the same on every rank.

    Only three numbers a row are sent: the largest logit, the sum of exponentials and the label's logit.
    """
    width = logits.shape[-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    top = _largest(wide, group)
    local = labels - group.rank() * width
    absent = (local < 0) | (local >= width)
    own = wide.gather(-1, local.masked_fill(absent, 0)[:, None]).squeeze(-1).masked_fill(absent, 0.0)
    exponentials = (wide - top[:, None]).exp().sum(-1)
    summed, target = sum_over(torch.stack((exponentials, own)), group)
    return (summed.log() + top - target).masked_fill(labels == ignore, 0.0).sum()


def _largest(wide: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_reduce(wide.detach().amax(-1), group, "max")
