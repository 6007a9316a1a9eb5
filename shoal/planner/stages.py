"""Stages of a pipeline in a simulated world: what they tell each other before the first step, where there is nobody else, and the
parts of their work, each of which can be had in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as schedules
import torch.distributed.pipelining.stage as stages
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shoal.planner.fake_device import replace


class Boundary(NamedTuple):
    """A tensor that goes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def shapes_between_stages(undo: ExitStack, boundary: Boundary) -> None:
    """Stages learn the shape of what comes from `boundary`, and not from each other, until `undo` is closed."""

    def told(stage: Any, source: int) -> Any:
        if source > stage.stage_index:
            return stages._StageBackwardMeta(stages._derive_grad_metas(stage._stage_meta.outputs))
        tensor = torch.empty(boundary.shape, dtype=boundary.dtype, device="meta", requires_grad=True)
        return stages._StageForwardMeta((stages.extract_tensor_meta(tensor),))

    if hasattr(stages.PipelineStage, "_recv_meta"):
        replace(undo, stages.PipelineStage, "_recv_meta", told)
        replace(undo, stages.PipelineStage, "_send_meta", lambda *_: None)
        return

    def told_objects(objects: list[Any], *_: Any, **__: Any) -> None:  # torch 2.11 sends shapes as objects
        objects[0] = (torch.empty(boundary.shape, dtype=boundary.dtype, device="meta"),)

    replace(undo, dist, "recv_object_list", told_objects)
    replace(undo, dist, "send_object_list", lambda *_, **__: None)


class Part(NamedTuple):
    """A part of a stage's work in a step."""

    kind: str
    """"begin" (of the whole schedule, which does something once), "gather", "gathered" (waits for it), "forward", "backward",
    "reduce", "free" """
    stage: int = -1
    micro_batch: int | None = None


class Waiting(NamedTuple):
    """What `FSDPModule.unshard` gives."""

    wait: Callable[[], Any]


Around = Callable[[Part, Callable[[], Any]], Any]
"""Given a part and the function that does it: calls that, or returns what it would"""


def stages_work(undo: ExitStack, around: Around, stage_of: Callable[[nn.Module], int]) -> None:
    """Let `around` do the parts of stages' work, until `undo` is closed; a part can be inside of another one.

    torch has no hook for them. The methods are those that its schedules call (torch/distributed/pipelining, 2.11 to 2.13).

    Args:
        stage_of: the stage of a module that is sharded.
    """

    def wrap(owner: Any, name: str, part_of: Callable[[Any], Part]) -> None:
        method: Any = getattr(owner, name, None)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(part_of(self), partial(method, self, *args, **kwargs))

        replace(undo, owner, name, run)

    def gather(module: Any, async_op: bool = False) -> Any:
        handle = around(Part("gather", stage_of(module)), partial(unshard, module, async_op))
        return handle and Waiting(partial(around, Part("gathered", stage_of(module)), handle.wait))

    def backward(self: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        going_back[self] = bwd_chunk_id
        return one_chunk(self, bwd_chunk_id, *args, **kwargs)

    base, going_back = stages._PipelineStageBase, dict[Any, int]()
    one_chunk, unshard = base.backward_one_chunk, FSDPModule.unshard
    replace(undo, base, "backward_one_chunk", backward)
    replace(undo, FSDPModule, "unshard", gather)
    wrap(FSDPModule, "reshard", lambda it: Part("free", stage_of(it)))
    wrap(base, "forward_maybe_with_nosync", lambda it: Part("forward", it.stage_index, it.submod.micro_batch))
    wrap(base, "backward_maybe_with_nosync", lambda it: Part("backward", it.stage_index, going_back[it]))
    wrap(base, "perform_reduce_grad", lambda it: Part("reduce", it.stage_index))
    wrap(schedules.PipelineScheduleSingle, "_initialize_stage", lambda _: Part("begin"))
    wrap(schedules.PipelineScheduleMulti, "_initialize_stages", lambda _: Part("begin"))
