"""Numbers in words, as messages have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def runs_text(numbers: Sequence[int]) -> str:
    """Numbers with equal ones in a row together.

    Example:
        >>> runs_text([3, 3, 1, 2])
        '3x2,1,2'
    """
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ",".join(f"{number}x{times}" if times > 1 else str(number) for number, times in runs)


def ordinal(number: int) -> str:
    """2nd, 3rd, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
