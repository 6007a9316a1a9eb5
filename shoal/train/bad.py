"""What a run remembers of bad samples: in its events, and in the manifests of its checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shoal.data.bad import EVERY_EPOCH, BadSamples, Known
from shoal.run import Run, read_json_lines
from shoal.world import World

EVENT = "bad sample"
KEY = "bad_samples"
"""of a manifest: each index with the newest epoch in which it was bad, or null for every epoch"""


class BadOfRun(NamedTuple):
    """Of the dataset to train on, and of the one to evaluate on, which is read anew each time."""

    train: BadSamples
    eval: BadSamples


def bad_of(run: Run) -> BadOfRun:
    """Nothing known yet; what is found becomes an event."""

    def tell(kind: str, details: dict[str, Any]) -> None:
        run.event(kind, **details)

    def tell_of_eval(kind: str, details: dict[str, Any]) -> None:
        run.event(kind, **details, split="eval")

    return BadOfRun(BadSamples(tell), BadSamples(tell_of_eval))


def remember_manifest(known: Known, manifest: dict[str, Any]) -> None:
    """What was known when a checkpoint was written."""
    for index, epoch in manifest.get(KEY, {}).items():
        known.note(_epoch(epoch), int(index))


def remember_events(known: Known, run: Run) -> None:
    """What was found since, too: steps that are taken again do without the same samples."""
    for event in bad_events(run):
        known.note(_epoch(event["epoch"]), event["index"])


def bad_events(run: Run) -> list[dict[str, Any]]:
    """Those of the dataset to train on, since the run began at its first step."""
    found: list[dict[str, Any]] = []
    for event in read_json_lines(run.events_file):
        if event["event"] == "start" and event["step"] == 0:
            found = []
        elif event["event"] == EVENT and "split" not in event:
            found.append(event)
    return found


def known_to_all(known: Known, world: World) -> dict[str, dict[str, int | None]]:
    """What all ranks know together, for a manifest. Collective."""
    together = Known(known)
    for index, epoch in _gathered(list(known.items()), world):
        together.note(epoch, index)
    return {KEY: {str(i): None if together[i] == EVERY_EPOCH else together[i] for i in sorted(together)}}


def _gathered(pairs: list[tuple[int, int]], world: World) -> list[list[int]]:
    if world.size == 1:
        return []
    mine = torch.tensor(len(pairs), device=world.device)
    counts = [torch.zeros_like(mine) for _ in range(world.size)]
    dist.all_gather(counts, mine)
    rows = max(int(count) for count in counts)
    if rows == 0:
        return []
    padded = torch.zeros(rows, 2, dtype=torch.int64, device=world.device)
    padded[: len(pairs)] = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    parts = [torch.zeros_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded)
    return [row for part, count in zip(parts, counts, strict=True) for row in part[: int(count)].tolist()]


def _epoch(told: int | None) -> int:
    return EVERY_EPOCH if told is None else told
