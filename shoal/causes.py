"""`causes`: an exception and those that it came from."""

from __future__ import annotations

from collections.abc import Iterator


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, what it was raised from or while handling, and so on.

    Example:
        >>> first, second = ValueError("one"), KeyError("two")
        >>> first.__cause__ = second
        >>> list(causes(first))
        [ValueError('one'), KeyError('two')]
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
