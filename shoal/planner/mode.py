"""The mode of a simulated world's tensors, which have shapes and no values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from shoal.planner.tape import Tape


class SimulatedMode(FakeTensorMode):
    """The mode of a simulated world's tensors. A tape that is paused sees through it what runs between compiled graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = super().__torch_dispatch__
        if self.tape is None or self._inside or not self.tape.between_graphs:
            return run(func, types, args, kwargs)
        self._inside = True  # operators of which this one is made are not seen
        try:
            return self.tape.sees(
                func, types, args, kwargs or {}, lambda func, args, kwargs: run(func, types, args, kwargs)
            )
        finally:
            self._inside = False
