"""A simulated world: the project's own `parallelize` and `Step` run for one rank of any number of ranks, on devices that are not
there, and every allocation is recorded.

Tensors are fake (shapes and types, no values) and the process group does nothing. What depends on values is stated instead:
experts get equally many tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import shoal.parallel.replicate as replicate
from shoal.cluster import Cluster
from shoal.data.cut import StepBatch
from shoal.job import Optimizer, Precision
from shoal.models.units import find_units
from shoal.parallel.apply import parallelize
from shoal.parallel.reach import LEAST_RATE
from shoal.parallel.replicate import core
from shoal.parallel.shard import parameter_groups, sharded_parameters
from shoal.parallel.spread import spread_of
from shoal.plan import Plan
from shoal.planner.buckets import SimulatedCopies
from shoal.planner.compiled import simulate_compile
from shoal.planner.fake_device import FakeDevice, fake_device, outside, replace
from shoal.planner.mode import SimulatedMode
from shoal.planner.pieces import simulate_pieces
from shoal.planner.stages import Boundary, shapes_between_stages
from shoal.planner.tape import Tape
from shoal.planner.trace import Trace
from shoal.planner.works import simulate_works
from shoal.train.objective import Objective, output_of
from shoal.train.step import Step, to_device
from shoal.world import World
from shoal.world.meeting import Meeting

CAPABILITIES = {
    "a100": (8, 0),
    "a100-40": (8, 0),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "b200": (10, 0),
    "mi300x": (9, 4),
}
HOPPER = (9, 0)  # and what is not in the list
STEPS = 2  # memory of the optimizer is there from the first update on


@dataclass(eq=False)
class SimulatedWorld(World):
    """A rank's view of a world that is not there."""

    tape: Tape = field(kw_only=True, repr=False)

    def _make_mesh(self, degrees: dict[str, int]) -> DeviceMesh:
        with outside():  # a mesh is of real numbers
            return init_device_mesh(self.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))


@contextmanager
def simulated_world(
    cluster: Cluster, rank: int, size: int, *, boundary: Boundary | None = None
) -> Iterator[SimulatedWorld]:
    """Be rank `rank` of `size` on devices of a cluster that need not exist; everything is undone at exit.

    Tensors that are made inside are fake. `world.tape.trace` has every allocation.

    Args:
        boundary: what goes from one stage of a pipeline to the next; needed for plans with one.

    Raises:
        ValueError: no such rank. RuntimeError: this process is in a process group, or sees a GPU.

    Example:
        with simulated_world(Cluster.parse("64x8 h100"), rank=0, size=512) as world:
            model = shoal.parallelize(MyModel, Plan(shard=512), world)
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank = {rank} is outside of a world of {size} ranks")
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group; simulate in one that is not")
    device = cluster.device
    capability = CAPABILITIES.get(device.kind, HOPPER)
    fake = FakeDevice(device.type, capability, device.memory_bytes or 0)
    with ExitStack() as undo:
        streams = undo.enter_context(fake_device(fake))
        replace(undo, replicate, "DistributedDataParallel", SimulatedCopies)
        simulate_pieces(undo)
        if boundary is not None:
            shapes_between_stages(undo, boundary)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        undo.callback(dist.destroy_process_group)
        mode = SimulatedMode()
        tape = Tape(mode, streams, capability if device.type == "cuda" else None)
        here = torch.device(device.type, 0) if device.type == "cuda" else torch.device("cpu")
        world = SimulatedWorld(
            rank,
            size,
            rank % cluster.devices_per_node,
            min(size, cluster.devices_per_node),
            here,
            "fake",
            timedelta(seconds=1),
            Meeting(dist.HashStore(), 0, 1, 1.0),  # which nobody else comes to
            tape=tape,
        )
        undo.enter_context(mode)
        undo.enter_context(tape)
        tape.see_sizes(undo)
        reach = (device.link_bytes_s or 0) >= LEAST_RATE
        simulate_works(undo, tape, holds=device.type == "cpu", reach=reach)
        simulate_compile(undo, tape)
        undo.callback(world._meshes.clear)
        undo.enter_context(_no_garbage())
        yield world


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Cycles of objects are not looked for meanwhile: a run does that between steps, and when is chance otherwise.

    Where they are looked for, it is among what was made meanwhile: to go through all that was imported takes half a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if was_on:
            gc.enable()


class Work(NamedTuple):
    """What is trained, as far as memory is concerned."""

    build: Callable[[], nn.Module]
    objective: Callable[[bool], Objective]
    """told whether the plan compiles"""
    optimizer: Optimizer
    precision: Precision
    batch: Callable[[Plan, int, int], StepBatch]
    """a rank's part of a global batch, from the plan, the rank and the step; tensors are made in the simulated world"""


def simulate(
    work: Work,
    plan: Plan,
    cluster: Cluster,
    rank: int = 0,
    *,
    steps: int = STEPS,
    boundary: Boundary | None = None,
) -> Trace:
    """Build the model of a plan and take a few steps, as one rank of a cluster would.

    Args:
        boundary: of a pipeline's stages, if it is known already: from `boundary_of`.

    Raises:
        ValueError: the plan does not fit the model or the batch: whatever training would raise.
    """
    if plan.pipeline > 1 and boundary is None:
        boundary = boundary_of(work, plan, cluster, rank)
    with simulated_world(cluster, rank, plan.world_size, boundary=boundary) as world:
        take_steps(work, plan, world, steps)
        return world.tape.trace


def take_steps(work: Work, plan: Plan, world: SimulatedWorld, steps: int) -> None:
    """What a run does on a rank, without its files."""
    model = parallelize(work.build, plan, world, precision=work.precision)
    compiled = plan.compiles(world.device.type)
    watch(model, world.tape, units=compiled != "model")
    step = Step(
        model,
        work.objective(compiled is not None),
        work.optimizer,
        plan,
        world,
        precision=work.precision,
        total_steps=max(steps, work.optimizer.warmup + work.optimizer.decay + 1),
        on_phase=_phases(model, world.tape),
    )
    step.on_micro_batch = lambda _: _tell_partial_sums(model, world.tape)
    for index in range(steps):
        step(work.batch(plan, world.rank, index))
        tell_state(step, world.tape)
        gc.collect()


def watch(model: nn.Module, tape: Tape, *, units: bool = True) -> None:
    """Let a tape know what memory of a model is for, and which block runs, unless all are one graph."""
    for name, block in _blocks(model) if units else ():
        block.register_forward_pre_hook(_entering(tape, name), prepend=True)
        block.register_forward_hook(_leaving(tape), always_call=True)
        if spread_of(model).pipeline is not None and isinstance(block, FSDPModule):
            _send_as(name, block, tape)
    _tell_model(model, tape)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a rank: one alone, as stages of a pipeline have it, is not seen to be one."""
    pipeline = spread_of(model).pipeline
    if pipeline is None:
        return [(unit.name, unit.module) for unit in find_units(core(model))]
    mine = {block for stage in pipeline.stages for block in stage.blocks}
    return [(name, module) for name, module in core(model).named_modules() if module in mine]


def _send_as(name: str, block: FSDPModule, tape: Tape) -> None:
    """Gradients are sent after all backwards, outside of any block: say whose they are."""

    def sends(send: Callable[..., Any]) -> Callable[..., Any]:
        def run(*unused: Any) -> Any:
            tape.enter_unit(name)
            result = send(*unused)
            tape.enter_unit("")
            return result

        return run

    for group in parameter_groups(block):
        group.post_backward = sends(group.post_backward)


def _entering(tape: Tape, name: str) -> Callable[..., None]:
    return lambda *_: tape.enter_unit(name)


def _leaving(tape: Tape) -> Callable[..., None]:
    return lambda *_: tape.enter_unit("")


def _phases(model: nn.Module, tape: Tape) -> Callable[[str, int], None]:
    def begin(phase: str, step: int) -> None:
        _tell_model(model, tape)
        tape.begin(phase, step)

    return begin


def _tell_model(model: nn.Module, tape: Tape) -> None:
    whole = core(model)
    for name, parameter in whole.named_parameters():
        tape.tell(parameter, "parameters", name)
        tape.tell(parameter.grad, "gradients", name)
    for name, buffer in whole.named_buffers():
        tape.tell(buffer, "parameters", name)
    roots: list[Any] = [whole, *spread_of(model).roots]
    names = {module: name for name, module in whole.named_modules()}
    for module in {inner for root in roots for inner in root.modules() if isinstance(inner, FSDPModule)}:
        _tell_gathered(module, tape, names)


def _tell_gathered(module: FSDPModule, tape: Tape, names: dict[nn.Module, str]) -> None:
    """What `fully_shard` gathers parameters into, which it knows by their names in a pipeline's stage."""
    for parameter in sharded_parameters(module):
        owner = names.get(parameter._module_info.module)
        name = "" if owner is None else f"{owner}.{parameter._module_info.param_name}".lstrip(".")
        for gathered in getattr(parameter, "all_gather_outputs", None) or ():
            tape.tell(gathered, "gathered", name)


def _tell_partial_sums(model: nn.Module, tape: Tape) -> None:
    """Gradients that ranks with other copies have not summed yet are no parameter's while micro-batches add to them."""
    for module in core(model).modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            tape.tell(group._partial_reduce_output, "gradients")


def tell_state(step: Step, tape: Tape) -> None:
    """Say which memory is the optimizer's."""
    for name, state in step.optimizer.state().items():
        tape.tell(state, "optimizer", name.rpartition(".")[0])


class _ArrivedError(Exception):
    """The first block has an output: nothing more is asked."""


def boundary_of(work: Work, plan: Plan, cluster: Cluster, rank: int) -> Boundary:
    """What the first block gives under a plan without the pipeline: stages send each other what blocks do."""
    flat = plan.model_copy(
        update={"pipeline": 1, "schedule": "1f1b", "virtual_stages": None, "compile": False}
    )
    inner = rank % flat.world_size  # the pipeline is the slowest axis
    found: list[Boundary] = []

    def see(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found.append(Boundary(tuple(output.shape), output.dtype))
        raise _ArrivedError

    with simulated_world(cluster, inner, flat.world_size) as world:
        model = parallelize(work.build, flat, world, precision=work.precision)
        find_units(core(model))[0].module.register_forward_hook(see)
        micro = work.batch(plan, rank, 0).micro_batches[0]
        data = spread_of(model).cut_inputs(to_device(micro.data, world.device))
        try:
            output_of(work.objective(False), model, data)
        except _ArrivedError:
            return found[0]
    raise ValueError(f"plan.pipeline = {plan.pipeline}: the model's forward runs none of its blocks")
