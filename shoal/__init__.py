"""Shoal: train any PyTorch model on any number of devices, with the same numbers as on one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.version import __version__

if TYPE_CHECKING:
    from shoal.cluster import Cluster
    from shoal.config import ConfigError, Settings, load
    from shoal.data.batches import batches, eval_batches, open_dataset
    from shoal.job import Job
    from shoal.layout import Layout
    from shoal.parallel.apply import parallelize
    from shoal.parallel.initialise import weights_hash
    from shoal.plan import Plan
    from shoal.run import Run
    from shoal.train.evaluate import evaluate
    from shoal.train.objective import Loss, NextToken, Objective, Supervised
    from shoal.train.optimizer import SGD, AdamW
    from shoal.train.step import Step
    from shoal.world import World, join_world

# Names are imported when they are used: `import shoal` takes no time and touches no device.
_HOMES = {
    "Cluster": "shoal.cluster",
    "ConfigError": "shoal.config",
    "Settings": "shoal.config",
    "load": "shoal.config",
    "batches": "shoal.data.batches",
    "eval_batches": "shoal.data.batches",
    "open_dataset": "shoal.data.batches",
    "Job": "shoal.job",
    "Layout": "shoal.layout",
    "parallelize": "shoal.parallel.apply",
    "weights_hash": "shoal.parallel.initialise",
    "Plan": "shoal.plan",
    "Run": "shoal.run",
    "evaluate": "shoal.train.evaluate",
    "Loss": "shoal.train.objective",
    "NextToken": "shoal.train.objective",
    "Objective": "shoal.train.objective",
    "Supervised": "shoal.train.objective",
    "AdamW": "shoal.train.optimizer",
    "SGD": "shoal.train.optimizer",
    "Step": "shoal.train.step",
    "World": "shoal.world",
    "join_world": "shoal.world",
}

__all__ = [
    "SGD",
    "AdamW",
    "Cluster",
    "ConfigError",
    "Job",
    "Layout",
    "Loss",
    "NextToken",
    "Objective",
    "Plan",
    "Run",
    "Settings",
    "Step",
    "Supervised",
    "World",
    "__version__",
    "batches",
    "eval_batches",
    "evaluate",
    "join_world",
    "load",
    "open_dataset",
    "parallelize",
    "weights_hash",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
