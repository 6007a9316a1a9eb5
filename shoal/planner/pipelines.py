"""Pipelines, of which not everything is simulated: micro-batches that are alike are played from the record of one, ranks with
like stages from the record of one rank, and of stages with many blocks that are alike only a few are there, and repeated after.

What a schedule does between its stages' parts (messages, buffers, the order) is torch's own code, which runs for each rank. What
is played is what a stage does in one part, such as forward of a micro-batch. The first micro-batch of each step is simulated:
memory is taken in it. From the second of the first step all others are played, but for the last of later steps, which is
simulated and shows whether they are like it. Where a record does not fit, or does not repeat, all is simulated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import shoal.parallel.stages
from shoal.cluster import Cluster
from shoal.parallel.apply import parallelize
from shoal.parallel.pipeline import Pipeline, Stage
from shoal.parallel.spread import spread_of
from shoal.parallel.stages import stages_of_rank
from shoal.plan import Plan
from shoal.planner.extend import alike_blocks, shortened
from shoal.planner.fake_device import replace
from shoal.planner.record import MODEL, Moved, NotAlikeError, Player, Record, Recorder, take_received
from shoal.planner.repeat import NotPeriodicError, extend
from shoal.planner.simulate import STEPS, SimulatedWorld, Work, simulated_world, take_steps
from shoal.planner.stages import Boundary, Part, stages_work
from shoal.planner.trace import Trace
from shoal.planner.work import is_played

Kind = tuple[tuple[int, ...], ...]
Traces = dict[int, Trace]
"""of the first rank of each place in the pipeline, by its number"""

KEPT = 6  # blocks of a stage
DEEP = 1.5  # times as many are worth repeating; below, to simulate them takes less time than to repeat events of the others


def simulate_stages(
    work: Work, plan: Plan, cluster: Cluster, boundary: Boundary, *, micro_batches: int, steps: int = STEPS
) -> Traces:
    """As `simulate` of the first rank of each place in the pipeline.

    Args:
        micro_batches: of a step; of those that `work` leaves out there is only the memory in which they are received.
    """
    ranks = range(0, plan.world_size, plan.world_size // plan.pipeline)
    short = _short(work, plan, cluster, boundary)

    def records(job: Work) -> Traces:
        return _by_records(job, plan, cluster, boundary, ranks, micro_batches, steps)

    def wholes(job: Work) -> Traces:
        return {rank: _whole(job, plan, cluster, rank, boundary, micro_batches, steps) for rank in ranks}

    if is_played(plan) and len(work.batch(plan, 0, 0).micro_batches) > MODEL + 2:
        with suppress(NotAlikeError):
            return _shorter_first(records, work, short)
    return _shorter_first(wholes, work, short)


class Short(NamedTuple):
    """A model whose stages have fewer blocks."""

    work: Work
    stages: list[range]
    """their blocks"""
    whole: list[range]
    """those of the stages that are asked for"""

    def extended(self, traces: Traces) -> Traces:
        """As if all blocks had been there.

        Raises:
            NotPeriodicError: they do not repeat.
        """
        return {
            rank: extend(trace, len(few), len(many), first=few.start, first_now=many.start)
            for (rank, trace), few, many in zip(traces.items(), self.stages, self.whole, strict=True)
        }


def _shorter_first(simulated: Callable[[Work], Traces], work: Work, short: Short | None) -> Traces:
    if short is not None:
        with suppress(NotPeriodicError), ExitStack() as undo:
            # by their size they might be cut elsewhere
            replace(undo, shoal.parallel.stages, "split_blocks", lambda *_, **__: short.stages)
            return short.extended(simulated(short.work))
    return simulated(work)


def _short(work: Work, plan: Plan, cluster: Cluster, boundary: Boundary) -> Short | None:
    """None where there would be as many blocks, or they are had otherwise than one by one, or a rank has several stages."""
    by_blocks = plan.stages_per_rank == 1 and plan.recompute_every == 1
    by_blocks &= not {"optimizer", "parameters"} & set(plan.offload)
    if not by_blocks or alike_blocks(work, numbered=False) <= DEEP * KEPT * plan.stages:
        return None
    with simulated_world(cluster, 0, plan.world_size, boundary=boundary) as world:
        pipeline = spread_of(parallelize(work.build, plan, world, precision=work.precision)).pipeline
    if pipeline is None:
        return None
    few, end = list[range](), 0
    for stage in pipeline.ranges:
        few.append(range(end, end + min(KEPT, len(stage))))
        end = few[-1].stop
    return Short(work._replace(build=shortened(work.build, end)), few, pipeline.ranges)


def _whole(
    work: Work, plan: Plan, cluster: Cluster, rank: int, boundary: Boundary, micro_batches: int, steps: int
) -> Trace:
    """Simulate all of a rank."""
    count = len(work.batch(plan, rank, 0).micro_batches)
    with simulated_world(cluster, rank, plan.world_size, boundary=boundary) as world, ExitStack() as undo:
        tape = world.tape

        def around(part: Part, do: Callable[[], Any]) -> Any:
            begin, result = len(tape.trace.events), do()
            if part.kind == "begin":
                take_received(tape, begin, boundary.nbytes, count, micro_batches - count)
            return result

        stages_work(undo, around, lambda _: -1)
        take_steps(work, plan, world, steps)
        return tape.trace


def _by_records(
    work: Work,
    plan: Plan,
    cluster: Cluster,
    boundary: Boundary,
    ranks: Sequence[int],
    micro_batches: int,
    steps: int,
) -> dict[int, Trace]:
    """Record a rank of each kind, and play the others.

    Raises:
        NotAlikeError: micro-batches or ranks are not as like as they should be.
    """
    found: dict[int, Trace] = {}
    records: dict[Kind, Record] = {}
    kinds: list[Kind] = []
    for place, rank in enumerate(ranks):
        record = records.get(kinds[place]) if kinds else None
        if record is not None:
            found[rank] = played(record, plan, cluster, rank, boundary, steps=steps)
            continue
        record = recorded(work, plan, cluster, rank, boundary, micro_batches=micro_batches, steps=steps)
        kinds = kinds or _kinds(record, plan, alike=alike_blocks(work, numbered=False) > 0)
        found[rank] = record.trace
        records[kinds[place]] = record
    return found


def _kinds(record: Record, plan: Plan, *, alike: bool) -> list[Kind]:
    """What the stages of each place in the pipeline are: those at the ends, and how many blocks the others have."""

    def like(stage: int) -> tuple[int, ...]:
        blocks = record.of_stages[stage]
        only = stage in (0, len(record.of_stages) - 1) or not alike
        return len(blocks), blocks.start % plan.recompute_every, stage if only else -1

    return [tuple(like(stage) for stage in stages_of_rank(plan, place)) for place in range(plan.pipeline)]


def recorded(
    work: Work,
    plan: Plan,
    cluster: Cluster,
    rank: int,
    boundary: Boundary,
    *,
    micro_batches: int,
    steps: int = STEPS,
) -> Record:
    """Simulate a rank, of whose micro-batches those between the second and the last are played.

    Args:
        micro_batches: as for `simulate_stages`.

    Raises:
        NotAlikeError: they would be others.
    """
    count = len(work.batch(plan, rank, 0).micro_batches)
    with (
        _told_apart(),
        simulated_world(cluster, rank, plan.world_size, boundary=boundary) as world,
        ExitStack() as undo,
    ):
        record = Record(rank, world.tape.trace, count)
        recorder = Recorder(record, world.tape, boundary.nbytes, micro_batches - count)
        stages_work(undo, recorder.around, record.stage_of)
        _watch_schedules(undo, record)
        take_steps(work, plan, world, steps)
        record.require_whole()
        return record


def played(
    record: Record, plan: Plan, cluster: Cluster, rank: int, boundary: Boundary, *, steps: int = STEPS
) -> Trace:
    """The trace of a rank whose stages are like those of a recorded one: only its schedule runs.

    Raises:
        NotAlikeError: the record does something that depends on the schedule.
    """
    with (
        _told_apart(),
        simulated_world(cluster, rank, plan.world_size, boundary=boundary) as world,
        ExitStack() as undo,
    ):
        player = Player(record, world.tape, Moved.between(record, rank, plan))
        stages_work(undo, player.around, lambda stage: cast(Stage, stage).index)
        pipeline = _empty(record, plan, world)
        end = 0
        for step in range(steps):
            player.play(end, record.entered[step], player.scope, strict=False)
            world.tape.begin("forward", step)
            pipeline.step(lambda *_: _passed_on(pipeline), record.count, train=True)
            end = record.left[step]
        player.play(end, len(record.trace.events), player.scope, strict=False)
        return world.tape.trace


@contextmanager
def _told_apart() -> Iterator[None]:
    """What is raised in a stage's forward torch gives as the cause of an error of its own, and writes a log of the schedule."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    before, log.disabled = log.disabled, True
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, NotAlikeError):
            raise error.__cause__ from None
        raise
    finally:
        log.disabled = before


def _passed_on(pipeline: Pipeline) -> Tensor:
    """What an empty stage gives when it is tried before the first step."""
    if pipeline.incoming is None:
        raise NotAlikeError
    return pipeline.incoming.clone()


def _empty(record: Record, plan: Plan, world: SimulatedWorld) -> Pipeline:
    """A rank's stages with nothing in them."""
    mine = stages_of_rank(plan, plan.coordinates(world.rank)["pipeline"])
    stages = [Stage(index, [], [], uses_every_parameter=False) for index in mine]
    if record.sharded:
        for stage in stages:  # as fully_shard does
            stage.__class__ = _ShardedStage
    group = world.mesh(plan).get_group("pipeline")
    return Pipeline(nn.Module(), plan, group, world.device, stages, [], [], record.of_stages)


class _ShardedStage(FSDPModule, Stage):
    """A stage whose schedule gathers it, and lets go of what was gathered."""


def _watch_schedules(undo: ExitStack, record: Record) -> None:
    """Note when a step's schedule begins and has ended."""
    step, schedule = Pipeline.step, Pipeline._schedule

    def watched(pipeline: Pipeline, *args: Any, **kwargs: Any) -> None:
        if not record.stages:
            record.of_stages, record.container = pipeline.ranges, pipeline.container
            for stage in pipeline.stages:
                record.stages.update(dict.fromkeys(stage.modules(), stage.index))
            record.sharded = any(isinstance(stage, FSDPModule) for stage in pipeline.stages)
        step(pipeline, *args, **kwargs)
        record.left.append(len(record.trace.events))

    def enters(pipeline: Pipeline, *args: Any) -> Any:
        record.entered.append(len(record.trace.events))
        return schedule(pipeline, *args)

    replace(undo, Pipeline, "step", watched)
    replace(undo, Pipeline, "_schedule", enters)
