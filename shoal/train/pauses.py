"""Python's garbage collection at moments of ours: a rank that pauses holds up all others, and each pauses at another time."""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

EVERY = 50  # steps between collections


class Pauses:
    """While it lasts, garbage is collected every `EVERY` steps, on all ranks after the same step.

    What is there after the first step (the model, compiled code) is not looked at again.

    Example:
        >>> with Pauses() as pauses:
        ...     pauses.after_step(0)
    """

    def __init__(self) -> None:
        self._was_on = gc.isenabled()
        self._frozen = False

    def __enter__(self) -> Self:
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Told that a step is done."""
        if not self._frozen:
            gc.collect()
            gc.freeze()
            self._frozen = True
        elif step % EVERY == 0:
            gc.collect()
