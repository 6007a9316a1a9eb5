"""The pipeline axis: consecutive blocks on consecutive ranks, run by a schedule of torch.distributed.pipelining.

A stage runs the model's own forward: the first stage begins it, every stage runs its blocks, the last stage ends it and
computes the loss. What is not a rank's is taken out of the model, so that names stay those of the whole model. Gradients of all
micro-batches are added up before they are sent over the data axes.

Sources: Huang et al. 2019 (GPipe, arXiv:1811.06965); Narayanan et al. 2021 (1F1B, interleaved, arXiv:2104.04473); Lamy-Poirier
2023 (looped breadth-first, arXiv:2211.05953); Qi et al. 2024 (zero bubble, arXiv:2401.10241; ZBV, arXiv:2405.15362);
DeepSeek-AI 2024 (DualPipe, arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shoal.layout import Layout
from shoal.parallel.recompute import BuffersKept
from shoal.parallel.stages import require_stages, stages_of_rank
from shoal.plan import Plan

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Absent(nn.Module):
    """Stands where another rank has a module, so that names stay."""


class Stage(nn.Module):
    """A stage's modules; its forward is what the pipeline is told to run."""

    def __init__(
        self,
        index: int,
        blocks: Sequence[nn.Module],
        others: Sequence[nn.Module],
        *,
        uses_every_parameter: bool,
    ) -> None:
        super().__init__()
        self.index, self.uses_every_parameter = index, uses_every_parameter
        self.blocks = nn.ModuleList(blocks)
        self.others = nn.ModuleList(others)
        self.run: Callable[[Tensor, int], Tensor] | None = None
        self.micro_batch: int | None = None
        """the number of the one that runs; None on trial, to see what comes out"""

    def forward(self, x: Tensor) -> Tensor:
        if self.run is None:
            raise RuntimeError("a pipeline's stage runs as part of a step")
        with BuffersKept(self) if self.micro_batch is None else nullcontext():
            return self.run(x, self.micro_batch or 0)


class _Stage(PipelineStage):
    """torch's stage, with four repairs.

    It runs its module once more than there are micro-batches, to see what comes out: buffers are not to count that. It asks for
    the gradients of weights one group after the other, and runs recomputed blocks once for each: in one group of backward
    passes they are run once for all. In evaluation V-shaped schedules pass gradients that are not there to a rank's other stage.
    Before the first step torch 2.11 has stages greet their neighbours, also one of the same rank, whom Gloo does not reach.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        stage: Any = self.submod
        stage.micro_batch = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            stage.micro_batch = None

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with _recomputing_once():
            return super().backward_weight_one_chunk(*args, **kwargs)


def _recomputing_once() -> AbstractContextManager[object]:
    """Older torch has no such group, and recomputes more often."""
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    return group() if group else nullcontext()


class Tie(NamedTuple):
    """A parameter that the first and the last stage both have."""

    name: str
    other_rank: int


@dataclass(eq=False)
class Pipeline:
    """This rank's stages, and the schedule that runs them."""

    model: nn.Module
    plan: Plan
    group: dist.ProcessGroup
    device: torch.device
    stages: list[Stage]
    blocks: list[nn.Module]
    """of the whole model; those of other ranks are `Absent`"""
    ties: list[Tie]
    ranges: list[range]
    """the blocks of each stage, of other ranks too"""
    container: str = ""
    """what has them in the model, by its path"""
    active: Stage | None = None
    incoming: Tensor | None = None
    before_step: list[Callable[[], None]] = field(default_factory=list)
    """called before any stage gathers or computes"""
    _schedules: dict[tuple[int, bool], Any] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return self.plan.pipeline * self.plan.stages_per_rank

    @property
    def has_last(self) -> bool:
        return any(stage.index == self.num_stages - 1 for stage in self.stages)

    def step(self, run: Callable[[int, bool], Tensor], micro_batches: int, *, train: bool) -> None:
        """Run all micro-batches forward, and with `train` backward.

        Args:
            run: calls the model on micro-batch i, and on the last stage (told by True) turns its output into a loss.
        """
        for begin in self.before_step:
            begin()
        for stage in self.stages:
            stage.run = self._runner(stage, run)
        schedule = self._schedule(micro_batches, train)
        index = torch.arange(micro_batches, device=self.device)
        arguments = (index,) if any(stage.index == 0 for stage in self.stages) else ()
        target = index if self.has_last else None
        call = schedule.step if train else schedule.eval
        call(*arguments, target=target)

    def _runner(self, stage: Stage, run: Callable[[int, bool], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def forward(x: Tensor, micro: int) -> Tensor:
            self.active, self.incoming = stage, x
            try:
                return run(micro, stage.index == self.num_stages - 1)
            finally:
                self.active = self.incoming = None

        return forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward on the stage that is active: what `Staged.forward` does, cut where the stage is."""
        stage, model = self.active, self.model
        if stage is None:
            raise RuntimeError("a model under a pipeline is called by a step alone")
        side = model.side_inputs(*inputs, **named)  # pyrefly: ignore[not-callable]
        x = model.begin(*inputs, **named) if stage.index == 0 else self.incoming  # pyrefly: ignore[not-callable]
        for block in stage.blocks:
            x = block(x, *side)
        return model.end(x) if stage.index == self.num_stages - 1 else x  # pyrefly: ignore[not-callable]

    def _schedule(self, micro_batches: int, train: bool) -> Any:
        key = (micro_batches, train)
        if key not in self._schedules:
            stages: list[Any] = [
                _Stage(stage, stage.index, self.num_stages, self.device, group=self.group)
                for stage in self.stages
            ]
            kind = self.plan.schedule
            self._schedules[key] = (
                SINGLE[kind](stages[0], micro_batches, loss_fn=_same, scale_grads=False)
                if kind in SINGLE
                else MULTIPLE[kind](stages, micro_batches, loss_fn=_same, scale_grads=False)
            )
        return self._schedules[key]

    @torch.no_grad()
    def sum_tied_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Add the other stage's gradient to that of each tied parameter, in place. Collective over the first and last rank."""
        for tie in self.ties:
            if tie.name not in gradients:  # frozen
                continue
            mine = gradients[tie.name].to(self.device)  # it may be in host memory
            theirs = torch.empty_like(mine)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine, tie.other_rank, self.group),
                    dist.P2POp(dist.irecv, theirs, tie.other_rank, self.group),
                ]
            )
            for work in works:
                work.wait()
            gradients[tie.name].copy_(mine.add_(theirs))


def _same(output: Tensor, target: Tensor) -> Tensor:
    """The loss, which the last stage has computed itself."""
    return output.sum()


def apply_pipeline(
    model: nn.Module, plan: Plan, group: dist.ProcessGroup, device: torch.device, layout: Layout
) -> Pipeline:
    """Take out of a model what other ranks have, in place.

    Raises:
        ValueError: on all ranks alike, as `require_stages`.
    """
    parts = require_stages(model, plan, layout)
    uses_all = bool(getattr(model, "uses_every_parameter", False))
    mine, last = stages_of_rank(plan, group.rank()), len(parts.ranges) - 1
    stages = [
        Stage(
            index,
            [parts.blocks[i] for i in parts.ranges[index]],
            list(parts.others(index).values()),
            uses_every_parameter=uses_all,
        )
        for index in mine
    ]
    kept = {module for stage in stages for module in (*stage.blocks, *stage.others)}
    for path, module in {**parts.before, **parts.after}.items():
        if module not in kept:
            _take_out(model, path)
    container = model.get_submodule(str(layout.blocks))
    for name, block in zip(parts.names, parts.blocks, strict=True):
        if block not in kept:
            container.register_module(name, Absent())
    other = dist.get_process_group_ranks(group)[plan.pipeline - 1 if 0 in mine else 0]
    ties = [Tie(name, other) for name in parts.tied] if mine[0] == 0 or last in mine else []
    pipeline = Pipeline(
        model, plan, group, device, stages, parts.blocks, ties, parts.ranges, str(layout.blocks)
    )
    model.forward = pipeline.forward
    return pipeline


def _take_out(model: nn.Module, path: str) -> None:
    owner, _, name = path.rpartition(".")
    model.get_submodule(owner).register_module(name, Absent())
