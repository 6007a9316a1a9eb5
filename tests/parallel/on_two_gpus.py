"""For torchrun, on two GPUs: by NCCL, sharding without copies gives the bits of `fully_shard`."""

from __future__ import annotations

from unittest.mock import patch

import torch

import shoal.parallel.apply as apply
from shoal.job import Precision
from shoal.parallel.exchange import Exchange
from shoal.parallel.sums import LEAST
from shoal.plan import Plan
from shoal.world import join_world
from tests.train.toy import DIMS, run_plan

BIG = DIMS._replace(dim=1024, ffn=4096, vocab=8192, heads=8, kv_heads=4, layers=3)


def main() -> None:
    """Every ZeRO stage in every precision that sends in another type than the masters', and in fp32."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert BIG.dim * BIG.ffn // 2 >= LEAST
    known: tuple[Precision, ...] = ("bf16", "fp32", "float8_gather")
    # squares that are found on the way are added up in another order, and the norm is part of the update
    with join_world() as world, patch.object(Exchange, "take_squares", lambda self: None):
        for precision in known:
            for zero in (1, 2, 3):
                plan = Plan.model_validate({"shard": world.size, "zero": zero, "micro_batch": 4})
                sent = run_plan(world, plan, precision, steps=4, dims=BIG, ahead=True)
                with patch.object(apply, "send_directly", lambda *_: []):
                    copied = run_plan(world, plan, precision, steps=4, dims=BIG)
                assert sent.losses == copied.losses, (precision, zero)
                for name, weight in copied.weights.items():
                    assert torch.equal(sent.weights[name], weight), (precision, zero, name)


if __name__ == "__main__":
    main()
