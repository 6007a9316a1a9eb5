"""Which changes of a job a run may take up in the middle: those that leave the numbers of done steps what they are."""

from __future__ import annotations

from typing import Any

from shoal.checkpoint.folder import Checkpoint
from shoal.job import Job

FREE = (  # a change of these bends what comes, and does not contradict what was
    "train.steps",
    "train.eval_every",
    "train.eval_samples",
    "train.loss_scale_growth",
    "data.workers",
    "optimizer.",
)


def require_same_numbers(checkpoint: Checkpoint, job: Job) -> None:
    """Refuse to go on with another model, other data, another batch or another kind of optimizer.

    Raises:
        ValueError: naming each key with its value then and now.
    """
    then, now = _flat(checkpoint.manifest["job"]), _flat(job.model_dump(mode="json"))
    other = [
        f"{key} = {now.get(key)!r}, was {then.get(key)!r}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and (key == "optimizer.name" or not key.startswith(FREE))
    ]
    if other:
        raise ValueError(
            f"{checkpoint.path} is of a run with other numbers: {'; '.join(other)}; choose another run.dir, or "
            "run.resume=false to begin anew in this one"
        )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
