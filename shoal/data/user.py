"""Datasets of the user's own: found by import path, told apart, each sample with randomness of its own."""

from __future__ import annotations

import ctypes
import inspect
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shoal.data.cut import Portions
from shoal.data.prefetch import DataError
from shoal.imports import call_object, load_object
from shoal.observe.host import cores
from shoal.randomness import random_state_kept, seed_random

DEATH_SETTLE_S = 0.2
MOST_LOADERS = 4  # of a rank that nobody gave a number

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


class SeededDataset(Dataset[Any]):
    """A map-style dataset read by (epoch, index); its random numbers depend on these and the seed alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, index: tuple[int, int]) -> Any:
        epoch, number = index
        seed_random(f"sample/{self._seed}/{epoch}/{number}")
        try:
            return self._dataset[number]
        except Exception as error:
            raise DataError(f"sample {number} (epoch {epoch}): {type(error).__name__}: {error}") from error


def map_loader(
    dataset: Any, portions: Portions, steps: range, *, seed: int, workers: int, deadline_s: float
) -> DataLoader[Any]:
    """A loader of one rank's micro-batches, collated, in order; a filler reads samples that do not count."""
    ids = (
        list(zip(portion.epoch[:rows].tolist(), portion.index[:rows].tolist(), strict=True))
        for step in steps
        for portion in portions(step)
        for rows in [portion.samples or len(portion.index)]
    )
    return DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=ids,  # pyrefly: ignore[bad-argument-type]: any iterable of keys will do
        num_workers=workers,
        collate_fn=collate_of(dataset),
        timeout=deadline_s if workers else 0,
        worker_init_fn=begin_loader,
        generator=torch.Generator(),  # without one, a loader draws from the global random numbers
    )


def loaded(loader: DataLoader[Any], workers: int, deadline_s: float) -> Generator[Any]:
    """What a loader yields. Errors say what was waited for; the trainer's random numbers stay as they are."""
    iterator = iter(loader)
    number = 0
    try:
        while True:
            try:
                with random_state_kept():
                    found = next(iterator)
            except StopIteration:
                return
            except DataError:
                raise
            except Exception as found_error:
                error = _root(found_error) if workers else found_error
                raise DataError(
                    f"micro-batch {number} from data.workers = {workers} loader processes (deadline "
                    f"{deadline_s:.0f} s): {type(error).__name__}: {error}"
                ) from error
            yield found
            number += 1
    finally:
        _end_processes(iterator)


def begin_loader(worker: int) -> None:
    """In a loader process: end when told to, as torch expects, and when its rank ends, however that ends (Linux)."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank's handler, inherited, would swallow it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the rank to act on
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _root(error: Exception) -> Exception:
    """The death of a loader process, if that is what an error comes from.

    A dead process is first seen as a closed connection; moments later torch's SIGCHLD handler raises the death
    itself, wherever the main thread is. Here it is waited for, so that it is reported and not lost.
    """
    try:
        time.sleep(DEATH_SETTLE_S)
    except RuntimeError as death:
        return death
    return error


def _end_processes(iterator: Any) -> None:
    """End a loader's processes now, though the traceback of an error may hold the iterator for long.

    Until then torch's SIGCHLD handler raises wherever the main thread is when one of them has died.
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)  # the iterator's __del__, by torch's name for it
    if shut_down is not None:
        shut_down()


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
