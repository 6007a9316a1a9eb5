"""Datasets of the user's own: found by import path, and told apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate

from shoal.imports import call_object, load_object
from shoal.job import OnError
from shoal.observe.host import cores

MOST_LOADERS = 4  # of a rank that nobody gave a number
MOST_TRIED = 64

Collate = Callable[[list[Any]], Any]


class UserDatasets(NamedTuple):
    """What the user's function gave: a dataset to train on and, of a pair, one to evaluate on."""

    train: Any
    eval: Any | None


def open_user_datasets(spec: str, options: dict[str, Any]) -> UserDatasets:
    """The dataset, or (train, eval) pair, that "package.module:dataset" names, as it is or when called.

    Raises:
        ValueError: nothing there, options it does not take, or a result that is no dataset.

    Example:
        >>> open_user_datasets("collections:UserList", {"initlist": [1, 2, 3]}).train
        [1, 2, 3]
    """
    found = load_object(spec)
    if callable(found) and not is_dataset(found):
        found = call_object(spec, options, "data.options")
    elif options:
        raise ValueError(
            f"data.options {sorted(options)} are for a function; {spec} is an object that takes none"
        )
    pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    for name, dataset in zip(("train", "eval"), pair, strict=True):
        if not is_dataset(dataset) and not (name == "eval" and dataset is None):
            raise ValueError(
                f"data.source {spec} gave {type(dataset).__name__} as its {name} dataset; expected a torch "
                "Dataset with __getitem__ and __len__, an IterableDataset, or a tuple (train, eval) of two"
            )
    return UserDatasets(*pair)


def is_dataset(thing: Any) -> bool:
    """Whether it is a map-style dataset (`__getitem__` and `__len__`) or an iterable one, not a class."""
    return not inspect.isclass(thing) and (is_iterable(thing) or _is_map_style(thing))


def is_iterable(thing: Any) -> bool:
    """Whether a dataset is read from front to back, and again: a torch IterableDataset, or an object like it.

    A generator or other iterator is not: it can be read only once, so neither resumed nor evaluated twice.
    """
    only_iterates = hasattr(thing, "__iter__") and not hasattr(thing, "__getitem__")
    return (isinstance(thing, IterableDataset) or only_iterates) and not hasattr(thing, "__next__")


def collate_of(dataset: Any) -> Collate:
    """How samples become a micro-batch: the dataset's `collate_fn`, else torch's `default_collate`."""
    return getattr(dataset, "collate_fn", None) or default_collate


def first_sample(dataset: Any, on_error: OnError) -> Any:
    """A sample of a map-style dataset, as all are: the first, or the first good one where bad ones are no reason to stop."""
    tries = 1 if on_error == "raise" else min(MOST_TRIED, len(dataset))
    for index in range(tries - 1):
        try:
            return dataset[index]
        except Exception:
            continue
    return dataset[tries - 1]


def loaders_for(said: int | None, device: torch.device | None) -> int:
    """Loader processes of a rank that reads by index: as said, else what its share of the cores leaves, on GPUs.

    A rank on a CPU computes with its cores, so it has none of its own accord.

    Example:
        >>> loaders_for(2, None), loaders_for(None, torch.device("cpu"))
        (2, 0)
    """
    if said is not None:
        return said
    if device is None or device.type == "cpu":
        return 0
    share = int(cores()) // max(1, torch.get_device_module(device).device_count())
    return max(0, min(MOST_LOADERS, share - 1))


def _is_map_style(thing: Any) -> bool:
    return (
        hasattr(thing, "__getitem__")
        and hasattr(thing, "__len__")
        and not isinstance(thing, str | bytes | tuple)
    )


def describe_samples(indices: Sequence[int]) -> str:
    """A few sample numbers for an error message."""
    shown = ", ".join(map(str, indices[:8]))
    return f"{shown}, ..." if len(indices) > 8 else shown
