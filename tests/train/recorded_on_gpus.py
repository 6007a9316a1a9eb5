"""For torchrun, on one or two GPUs: recorded steps have the bits of steps that the host launches."""

from __future__ import annotations

from typing import Any, cast

import torch

from shoal.job import Precision
from shoal.plan import Plan
from shoal.train.recorded import STEPS_BEFORE
from shoal.world import World, join_world
from tests.train.toy import DIMS, run_plan

BIG = DIMS._replace(dim=512, ffn=1024, vocab=1024, heads=8, kv_heads=4, layers=3)

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
    """Every plan of this many GPUs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with join_world() as world:
        wrong = [
            text for precision, words in CASES[world.size] if (text := difference(world, precision, words))
        ]
    if wrong:
        raise SystemExit("\n".join(wrong))


def difference(world: World, precision: Precision, words: dict[str, Any]) -> str:
    """What differs between a recorded run and one that is not; nothing, if all is well."""
    plan = Plan.model_validate({"micro_batch": 4, **words})
    steps, dims = STEPS_BEFORE + 4, BIG
    launched = run_plan(world, plan, precision, steps=steps, dims=dims)
    recorded = run_plan(
        world, plan.model_copy(update={"cuda_graphs": True}), precision, steps=steps, dims=dims
    )
    case = f"{precision} {words}"
    if world.is_main:
        print(case, recorded.losses, flush=True)
    if recorded.losses != launched.losses:
        return f"{case}: losses {recorded.losses} against {launched.losses}"
    names = [n for n, weight in launched.weights.items() if not torch.equal(recorded.weights[n], weight)]
    return f"{case}: weights of {cast(Any, names)}" if names else ""


if __name__ == "__main__":
    main()
