"""Initial weights that depend on (seed, parameter name) and on nothing else: not on ranks, devices or plans.

Two ways in. A model that offers `init_parameter(name, tensor, generator)` is built on the meta device and filled one whole
parameter at a time, of which each rank keeps its part: no rank ever holds the model. If it offers `read_part(name, part, shape)`
too, what that gives (weights from files) is taken first. A module whose buffers are on the meta device then offers
`init_buffers()`, which sets them. Any other model is built for real, on the CPU of every rank, under one seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shoal.parallel.replicate import core
from shoal.parallel.shard import reshard
from shoal.randomness import random_state_kept, seed_random
from shoal.simulated import is_simulated

InitParameter = Callable[[str, Tensor, torch.Generator], None]
"""Sets one whole parameter, given by its name, to its initial value in place."""
_EMPTY = "_shoal_empty"  # of a model whose weights are still to be loaded


def initialiser_of(model: nn.Module) -> InitParameter | None:
    """The model's `init_parameter`, if it can set any of its parameters alone and nothing else waits for values."""
    offered: Any = getattr(model, "init_parameter", None)
    waiting = [module for module in model.modules() if any(b.is_meta for b in module.buffers(recurse=False))]
    return offered if callable(offered) and all(_sets_buffers(module) for module in waiting) else None


def _sets_buffers(module: nn.Module) -> bool:
    return callable(getattr(module, "init_buffers", None))


def seed_of(*names: object) -> int:
    """A 63-bit seed that depends on all the names.

    Example:
        >>> seed_of(0, "head.weight") == seed_of(0, "head.weight") != seed_of(1, "head.weight")
        True
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def build(builder: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call a builder: on the meta device if its model can be initialised by name, otherwise for real, seeded.

    Raises:
        TypeError: the builder returned something else than an nn.Module.
    """
    model = build_on_meta(builder)
    if isinstance(model, nn.Module) and initialiser_of(model):
        return model
    with random_state_kept():
        seed_random(f"{seed}/build")
        return _called(builder)


def build_on_meta(builder: Callable[[], nn.Module]) -> nn.Module | None:
    """The model without storage; None for a builder that needs real tensors, such as for `.item()`."""
    try:
        with torch.device("meta"):
            return builder()
    except Exception:  # whatever it is, the real build raises it too, or does not have it
        return None


def _called(builder: Callable[[], nn.Module]) -> nn.Module:
    model = builder()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{builder} returned {type(model).__name__}; a model's builder returns an nn.Module")
    return model


def is_meta(model: nn.Module) -> bool:
    """Whether the model still waits for its weights."""
    return any(parameter.is_meta for parameter in model.parameters())


def materialise(
    model: nn.Module,
    init_parameter: InitParameter,
    device: torch.device,
    masters: torch.device,
    seed: int,
    *,
    empty: bool = False,
) -> None:
    """Give a meta model storage and the initial weights of `seed`, sharded parameters their part.

    Buffers that are not on the meta device keep their values.

    Args:
        device: of the buffers, which compute their values on it. masters: of the parameters.
        empty: weights are loaded later, and are NaN until then, so that none is forgotten. A model that cannot set its buffers
            beside weights of zeros gets its weights all the same.
    """
    ties = tied_names(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    model.to_empty(device=masters)
    for module in model.modules() if masters != device else ():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    _tie(model, ties)  # to_empty gives each use of a tied parameter storage of its own
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    if empty and _stays_empty(model):
        return
    if not is_simulated():  # there are no values to set
        fill(model, init_parameter, seed)
    fill_buffers(model)


def _stays_empty(model: nn.Module) -> bool:
    """Set buffers alone, and weights to what cannot be taken for some; False if buffers cannot be set so."""
    _set_all(model, 0.0)
    try:
        fill_buffers(model)
    except Exception:  # whatever it is, it does not come with weights, or comes again
        return False
    _set_all(model, math.nan)
    model.__dict__[_EMPTY] = True
    return True


@torch.no_grad()
def _set_all(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        takes_any = local.is_floating_point() or local.is_complex()
        local.fill_(value if takes_any else 0)


def give_weights(model: nn.Module, seed: int) -> None:
    """The initial weights of `seed`, if `parallelize` gave none."""
    model = core(model)
    init_parameter = initialiser_of(model)
    if model.__dict__.pop(_EMPTY, False) and init_parameter is not None:
        reshard(model)
        fill(model, init_parameter, seed)
        fill_buffers(model)


@torch.no_grad()
def fill_buffers(model: nn.Module) -> None:
    """Set the buffers of every module that offers `init_buffers()`."""
    for module in model.modules():
        if _sets_buffers(module):
            module.init_buffers()  # pyrefly: ignore[not-callable]


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same, in groups of two or more."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            model.get_submodule(owner).register_parameter(name, parameter)


@torch.no_grad()
def fill(model: nn.Module, init_parameter: InitParameter, seed: int) -> None:
    """Set every parameter, a few at a time on the CPU (one thread each): to what the model reads, or from whole tensors."""
    named = list(model.named_parameters())
    read_part: Any = getattr(model, "read_part", None)

    def part(item: tuple[str, nn.Parameter]) -> Tensor:
        name, parameter = item
        where = part_slices(parameter)
        read = read_part(name, where, parameter.shape) if read_part else None
        if read is not None:
            return read.to(parameter.dtype)
        # drawn in fp32 whatever the master type, so that fp32 and fp64 runs start from the same values
        tensor = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        init_parameter(name, tensor, torch.Generator().manual_seed(seed_of(seed, name)))
        return tensor[where].to(parameter.dtype)

    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
        for (_, parameter), tensor in zip(named, _ahead(pool, part, named), strict=True):
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(tensor)


def _ahead(pool: ThreadPoolExecutor, make: Callable[..., Tensor], items: list) -> Iterator[Tensor]:
    """Results in order, with only as many in the making as the pool has threads: whole tensors are large."""
    width = pool._max_workers
    waiting = [pool.submit(make, item) for item in items[:width]]
    for index in range(len(items)):
        yield waiting.pop(0).result()
        if index + width < len(items):
            waiting.append(pool.submit(make, items[index + width]))


def part_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a parameter lies in the whole, dim by dim.

    From the last mesh axis to the first: the tensor axis has cut a parameter before `fully_shard` cuts what is left.
    """
    first, last = [0] * parameter.dim(), list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis in reversed(range(mesh.ndim)):
            placement: Any = parameter.placements[axis]
            if not placement.is_replicate():
                dim, rank = placement.dim, mesh.get_local_rank(axis)
                size = -(
                    -(last[dim] - first[dim]) // mesh.size(axis)
                )  # as torch.chunk cuts: the last parts may be empty
                first[dim] = min(first[dim] + rank * size, last[dim])
                last[dim] = min(first[dim] + size, last[dim])
    return tuple(slice(*ends) for ends in zip(first, last, strict=True))


@torch.no_grad()
def whole_tensor(x: Tensor) -> Tensor:
    """The whole of a plain or sharded tensor, on every rank. Collective: axis by axis, the last to be cut first."""
    if not isinstance(x, DTensor):
        return x
    if x.device.type != x.device_mesh.device_type:  # ranks exchange what is on their devices
        x = DTensor.from_local(
            x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    placements: list[Any] = list(x.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


@torch.no_grad()
def weights_hash(model: nn.Module) -> str:
    """sha256 over the names and bytes of all whole parameters; equal for every plan. Collective for spread models."""
    digests: dict[str, str] = {}
    reshard(model)
    for name, parameter in core(model).named_parameters():
        content = whole_tensor(parameter).detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(content).hexdigest()
    if dist.is_initialized():  # ranks of a pipeline have different ones
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digests)
        digests = {name: digest for known in everyone for name, digest in known.items()}
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
