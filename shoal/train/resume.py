"""Which changes of a job a run may take up in the middle: those that leave the numbers of done steps what they are."""

from __future__ import annotations

import json
from typing import Any

from shoal.checkpoint.folder import Checkpoint
from shoal.job import Job

FREE = (  # a change of these bends what comes, and does not contradict what was
    "train.steps",
    "train.eval_every",
    "train.eval_samples",
    "train.loss_scale_growth",
    "data.workers",
    "data.on_error",
    "data.most_bad",
    "data.deadline_s",
    "optimizer.",
)


def require_same_numbers(checkpoint: Checkpoint, job: Job) -> None:
    """Refuse to go on with another model, other data, another batch or another kind of optimizer.

    Raises:
        ValueError: naming each key with its value then and now, and what can be done.
    """
    # what a version before did not know was as it is by default
    then, now = (
        _flat(Job().model_dump(mode="json")) | _flat(checkpoint.manifest["job"]),
        _flat(job.model_dump(mode="json")),
    )
    other = [
        key
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and (key == "optimizer.name" or not key.startswith(FREE))
    ]
    if other:
        changes = "; ".join(f"{key} was {_said(then, key)} and is now {_said(now, key)}" for key in other)
        raise ValueError(
            f"{checkpoint.path} is of another job than this one: {changes}. To go on with that job, give {_these(other)} the "
            "old value again; to train this one, choose another run.dir, or run.resume=false, which sets aside what is in this "
            "one"
        )


def _these(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"these {len(keys)} keys"


def _said(flat: dict[str, Any], key: str) -> str:
    return "left out" if flat.get(key) is None else json.dumps(flat[key])


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
