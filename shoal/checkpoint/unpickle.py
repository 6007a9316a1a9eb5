"""Files of `torch.save` that hold more than tensors, read without running any code that their writer chose."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Self

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


class Inert:
    """What stands in a file for an object whose class is not torch's: it holds what was stored of it, and does nothing.

    Example:
        >>> Inert(2).args
        (2,)
    """

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Self:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        """As any class is called; `__new__` has done it."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


def load_inert(path: Path) -> Any:
    """What a file of `torch.save` holds, on the CPU; tensors stay in the file until they are read.

    torch's unpickler for weights builds tensors and plain containers. Each other class and function that the file names is
    replaced by `Inert`, whether it is installed here or not.

    Raises:
        ValueError: it is no such file, was cut off, or needs more than stand-ins; names it.
    """
    try:
        named = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(Inert, name) for name in named]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r} is missing") from None
    except (
        Exception
    ) as error:  # of many kinds: not a zip file, one that was cut off, a name that is never let in
        raise ValueError(f"{str(path)!r} cannot be read: {why_unread(error)}") from error


def why_unread(error: Exception) -> str:
    """The one line of what `torch.load` raised that says why, without its advice to let the file run code."""
    found = error.__context__ if isinstance(error, UnpicklingError) and error.__context__ else error
    return next(iter(str(found).splitlines()), "") or type(found).__name__
