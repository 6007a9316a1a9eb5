"""What the ranks tell each other about their data: one small all-reduce, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal.data.cut import WorldLike
from shoal.data.prefetch import DataError

POLL_S = (50e-6, 2e-3)


def most_of(values: Sequence[int], world: WorldLike, step: int, deadline_s: float, purpose: str) -> list[int]:
    """The largest value that any rank has in each place; values are from 0 to 255. Collective.

    Raises:
        DataError: a rank did not come within `deadline_s` seconds. Names the step.
    """
    if world.size == 1:
        return list(values)
    told = torch.tensor(list(values), dtype=torch.uint8).to(group_device())
    work = dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)
    end, pause = time.monotonic() + deadline_s, POLL_S[0]
    while work is not None and not work.is_completed():
        if time.monotonic() > end:
            raise DataError(
                f"step {step}: rank {world.rank} waited {deadline_s:.0f} s for the other ranks to {purpose}. "
                "One of them is stuck in its dataset or has ended; see its log."
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL_S[1])
    if work is not None:
        try:
            work.wait()
        except Exception as error:
            error.add_note(f"at step {step}, while ranks waited for each other to {purpose}")
            raise
    return told.tolist()


def group_device() -> torch.device:
    """Where the default process group reduces."""
    on_cpu = any(name in dist.get_backend() for name in ("gloo", "mpi"))
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
