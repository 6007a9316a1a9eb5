"""What a person sees while a run goes on: a live line on a terminal, plain lines in a log. Rank 0 only."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.observe.metrics import GIB, Metrics


class Progress:
    """Prints steps; silent when `shown` is false.

    Example:
        >>> with Progress(10, shown=False) as progress:
        ...     progress.say("hello")
    """

    def __init__(self, total_steps: int, *, shown: bool, every: int = 1) -> None:
        self._total, self._shown, self._every = total_steps, shown, every
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, refresh_per_second=4) if shown and self._console.is_terminal else None
        )
        self._began = time.monotonic()
        self._first: int | None = None
        self._units, self._seconds = 0, 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._shown:
            self._console.print(text, markup=False)

    def step(self, metrics: Metrics) -> None:
        """Take in a finished step."""
        if not self._shown:
            return
        if self._first is None or metrics.step < self._first:  # the run may have gone back
            self._first, self._began = metrics.step, time.monotonic()
        self._units, self._seconds = self._units + metrics.units, self._seconds + metrics.seconds
        line = self._line(metrics)
        if self._live:
            self._live.update(Text(line))
        last = metrics.step == self._total
        if metrics.step % self._every == 0 or last or metrics.skipped:
            self.say(line)
            self._units, self._seconds = 0, 0.0

    def _line(self, metrics: Metrics) -> str:
        width = len(str(self._total))
        parts = [
            f"step {metrics.step:>{width}}/{self._total}",
            f"loss {metrics.loss:.4f}",
            f"norm {metrics.grad_norm:.3f}",
            f"lr {metrics.lr:.2e}",
            f"{self._units / self._seconds if self._seconds else 0:,.0f} {metrics.unit}/s",  # since the last line
        ]
        if metrics.mfu is not None:
            parts.append(f"mfu {metrics.mfu:.1%}")
        parts.append(f"{metrics.memory_bytes / GIB:.2f} GiB")
        parts.append(f"left {self._left(metrics.step)}")
        return "  ".join(parts) + ("  SKIPPED: not finite" if metrics.skipped else "")

    def _left(self, step: int) -> str:
        done = step - (self._first or 0)
        if not done:
            return "-"
        seconds = int((time.monotonic() - self._began) / done * (self._total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
