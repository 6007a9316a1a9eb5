"""For torchrun, on one or two GPUs: recorded steps have the bits of steps that the host launches."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shoal.data.cut import MicroBatch, StepBatch
from shoal.job import Precision
from shoal.models.presets import LlamaDims
from shoal.parallel.apply import parallelize
from shoal.parallel.shard import reshard
from shoal.plan import Plan
from shoal.train.nonfinite import find_cause
from shoal.train.objective import NextToken
from shoal.train.recorded import STEPS_BEFORE, Graph, Pass, Recorded
from shoal.train.step import Step
from shoal.world import World, join_world
from tests.train.toy import BATCH, DIMS, LENGTH, OPTIMIZER, build, global_batch, part_of, whole_weights

BIG = DIMS._replace(dim=512, ffn=1024, vocab=1024, heads=8, kv_heads=4, layers=3)
STEPS = STEPS_BEFORE + 8
SHORT_LENGTH = 8  # the ring of two cuts it into four
SHORT, LOOKED_INTO = STEPS_BEFORE + 2, STEPS_BEFORE + 4
"""a step of other shapes, and one that is looked into as a skipped one is; both amid recorded ones"""

CASES: dict[int, list[tuple[Precision, dict[str, Any]]]] = {
    1: [
        ("fp32", {"compile": False}),
        ("bf16", {}),
        ("bf16", {"micro_batch": 16}),
        ("bf16", {"compile": "model"}),
        ("fp16", {}),
        ("float8", {}),
    ],
    2: [
        ("bf16", {"shard": 2, "zero": 1}),
        ("bf16", {"shard": 2, "zero": 2, "micro_batch": 8}),
        ("bf16", {"shard": 2, "zero": 2}),
        ("bf16", {"shard": 2, "zero": 3}),
        ("fp32", {"shard": 2, "zero": 2, "compile": False}),
        ("fp16", {"shard": 2, "zero": 2}),
        ("float8_gather", {"shard": 2, "zero": 3}),
        ("bf16", {"tensor": 2}),
        ("bf16", {"context": 2, "context_by": "all_to_all"}),
        ("bf16", {"context": 2}),
    ],
}


def main() -> None:
    """Every plan of this many GPUs, or those that have a word, such as "context"."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # one kernel for all lengths, which the shorter step would bring, has other bits than the one that was recorded
    torch._dynamo.config.automatic_dynamic_shapes = False
    with join_world() as world:
        cases = [case for case in CASES[world.size] if all(word in str(case) for word in sys.argv[1:])]
        wrong = [text for precision, words in cases if (text := difference(world, precision, words))]
    if wrong:
        raise SystemExit("\n".join(wrong))


def difference(world: World, precision: Precision, words: dict[str, Any]) -> str:
    """What differs between a recorded run and one that is not; nothing, if all is well."""
    plan = Plan.model_validate({"micro_batch": 2, **words})
    numbers, weights, none = run(world, plan, precision)
    found, recorded, replays = run(world, plan.model_copy(update={"cuda_graphs": True}), precision)
    case = f"{precision} {words}"
    if world.is_main:
        print(case, replays, found, flush=True)
    # under a loss scale a skipped step is not looked into
    forgotten = 0 if precision == "fp16" else STEPS_BEFORE
    if none or replays != STEPS - STEPS_BEFORE - 1 - forgotten:
        return f"{case}: {none} and {replays} replays"
    if found != numbers:
        return f"{case}: losses and norms {found} against {numbers}"
    names = [name for name, weight in weights.items() if not torch.equal(recorded[name], weight)]
    return f"{case}: weights of {names}" if names else ""


Numbers = list[tuple[float, float]]


def run(
    world: World, plan: Plan, precision: Precision, dims: LlamaDims = BIG
) -> tuple[Numbers, dict[str, Tensor], int]:
    """Losses and norms, the weights after all steps, and the number of replays."""
    torch.compiler.reset()  # or it falls back to no compilation after 8 plans
    model = parallelize(partial(build, dims), plan, world, precision=precision, seed=7)
    usual = BATCH * LENGTH / 2
    step = Step(
        model, NextToken(), OPTIMIZER, plan, world, precision=precision, total_steps=STEPS, usual_weight=usual
    )
    numbers: Numbers = []
    replays: list[Graph] = []
    replay = Recorded._replay

    def noted(self: Recorded, graph: Graph) -> Pass:
        replays.append(graph)
        return replay(self, graph)

    with patch.object(Recorded, "_replay", noted):
        for number in range(STEPS):
            batch = part_of(global_batch(number), number, plan, world.rank)
            result = step(shorter(batch) if number == SHORT else batch, ahead=number < STEPS - 1)
            numbers.append((result.loss, result.grad_norm))
            if number == LOOKED_INTO:
                find_cause(step, result, lambda micro: [micro.first])
            elif number % 2:
                with torch.no_grad():
                    data = step._bring(batch.micro_batches[0]).data
                    NextToken().forward(model, data)
    reshard(model)
    return numbers, whole_weights(model), len(replays)


def shorter(batch: StepBatch) -> StepBatch:
    """The same with the beginning of each sequence."""
    cut = [
        MicroBatch({k: v[:, :SHORT_LENGTH] for k, v in micro.data.items()}, micro.first, micro.samples)
        for micro in batch.micro_batches
    ]
    return StepBatch(batch.step, tuple(cut))


if __name__ == "__main__":
    main()
