"""What stages of a pipeline tell each other before the first step, in a simulated world where there is nobody else."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.pipelining.stage as stages

from shoal.planner.fake_device import replace


class Boundary(NamedTuple):
    """A tensor that goes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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
