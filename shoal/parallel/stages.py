"""How a model is cut into the stages of a pipeline, and which rank has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from shoal.layout import Layout
from shoal.parallel.layout import modules_named
from shoal.plan import Plan
from shoal.words import fewer_stages


def stages_of_rank(plan: Plan, rank: int) -> list[int]:
    """Indices of the stages of a rank of the pipeline axis: going round, or down and up again for the V-shaped schedules."""
    ranks = plan.pipeline
    if plan.schedule in ("zbv", "dualpipev"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(plan.stages_per_rank)]


def split_blocks(costs: Sequence[float], begin: float, end: float, stages: int) -> list[range]:
    """Consecutive blocks for each stage, so that the most expensive stage is as cheap as can be.

    Args:
        costs: of the blocks. begin, end: of what the first stage does before them and the last stage after them.

    Raises:
        ValueError: fewer blocks than stages.

    Example:
        >>> split_blocks([1, 1, 1, 1, 1, 1], begin=0, end=2, stages=2)
        [range(0, 4), range(4, 6)]
    """
    count = len(costs)
    if stages > count:
        raise ValueError(f"{stages} pipeline stages for {count} blocks; use at most {count}")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def of(stage: int, first: int, last: int) -> float:
        return sums[last] - sums[first] + begin * (stage == 0) + end * (stage == stages - 1)

    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        for last in range(stage + 1, count - (stages - 1 - stage) + 1):
            row[last] = min(
                (max(best[stage][first][0], of(stage, first, last)), first)
                for first in best[stage]
                if first < last
            )
        best.append(row)
    found: list[range] = []
    last = count
    for stage in reversed(range(stages)):
        first = best[stage + 1][last][1]
        found.append(range(first, last))
        last = first
    return found[::-1]


class Parts(NamedTuple):
    """A model, cut into stages."""

    names: list[str]
    """of the blocks in their container"""
    blocks: list[nn.Module]
    ranges: list[range]
    """the blocks of each stage"""
    before: dict[str, nn.Module]
    after: dict[str, nn.Module]
    tied: list[str]

    def others(self, index: int) -> dict[str, nn.Module]:
        """By path, what a stage has beside its blocks."""
        found = dict(self.before) if index == 0 else {}
        if index == len(self.ranges) - 1:  # a tied parameter keeps the name that it has in the whole model
            shared = (path for path in self.before if any(name.startswith(f"{path}.") for name in self.tied))
            found |= self.after | {path: self.before[path] for path in shared}
        return found

    def modules(self, index: int) -> list[nn.Module]:
        """All that a stage has."""
        return [*(self.blocks[i] for i in self.ranges[index]), *self.others(index).values()]


def require_stages(model: nn.Module, plan: Plan, layout: Layout) -> Parts:
    """How a whole model is cut into a plan's stages; it is not changed.

    Raises:
        ValueError: the model has no `begin`, `side_inputs` and `end`, or its layout names no blocks; there are fewer blocks than
            stages, tied parameters on one rank twice, or a rank with nothing to train.
    """
    _require_staged(model, layout)
    container = model.get_submodule(str(layout.blocks))
    names = [name for name, _ in container.named_children()]
    blocks = [container.get_submodule(name) for name in names]
    if plan.stages > len(blocks):
        raise ValueError(
            f"plan.pipeline = {plan.pipeline} makes {plan.stages} stages (plan.schedule = {plan.schedule!r}) for the "
            f"{len(blocks)} blocks of {type(model).__name__}; {fewer_stages(plan, len(blocks))}"
        )
    before, after = (modules_named(model, group_of) for group_of in (layout.begin, layout.end))
    ranges = split_blocks(
        [_size(block) for block in blocks],
        0.0,  # a lookup costs next to nothing
        sum(_size(module) for module in after.values()),
        plan.stages,
    )
    parts = Parts(names, blocks, ranges, before, after, _tied(before, after))
    if parts.tied and len(ranges) - 1 in stages_of_rank(plan, 0):
        raise ValueError(
            f"plan.schedule = {plan.schedule!r} puts the first and last stage on one rank, which this version does not do for "
            f"tied parameters ({', '.join(parts.tied)}); use another schedule, or a model whose ends are not tied (transformers: "
            "model.options.config.tie_word_embeddings=false)"
        )
    _require_trained(parts, plan)
    return parts


def _require_trained(parts: Parts, plan: Plan) -> None:
    """Every rank needs something to train: each has an optimizer. A frozen stage on a rank that trains another is fine."""
    idle = [
        rank
        for rank in range(plan.pipeline)
        if not any(
            parameter.requires_grad
            for index in stages_of_rank(plan, rank)
            for module in parts.modules(index)
            for parameter in module.parameters()
        )
    ]
    if idle and len(idle) < plan.pipeline:  # with nothing to train at all the optimizer says so
        held = [parts.names[i] for index in stages_of_rank(plan, idle[0]) for i in parts.ranges[index]]
        raise ValueError(
            f"plan.pipeline = {plan.pipeline} leaves rank {idle[0]} of the pipeline blocks {', '.join(held)}, of which every "
            "parameter is frozen, and each rank needs one to train; use plan.pipeline=1 with other axes, or train a parameter "
            "of these blocks"
        )


def _require_staged(model: nn.Module, layout: Layout) -> None:
    missing = [name for name in ("begin", "side_inputs", "end") if not callable(getattr(model, name, None))]
    if layout.blocks is None or missing:
        lacks = f"no method {', '.join(missing)}" if missing else "a layout without blocks"
        raise ValueError(
            f"plan.pipeline cuts a model between its blocks, and {type(model).__name__} has {lacks}; see docs/models.md, or use "
            "other axes"
        )


def _tied(before: dict[str, nn.Module], after: dict[str, nn.Module]) -> list[str]:
    """Names, as the model gives them first, of parameters that both ends have."""
    ends = {id(parameter) for module in after.values() for parameter in module.parameters()}
    return [
        f"{path}.{name}"
        for path, module in before.items()
        for name, parameter in module.named_parameters()
        if id(parameter) in ends
    ]


def _size(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))
