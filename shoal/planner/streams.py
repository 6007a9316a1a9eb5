"""Streams and events of a simulated device. Nothing runs on them: they say which pool of memory a tensor is from, and what waits
for what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CUDA = 1  # c10::DeviceType


def _nobody(*_: Any) -> None:
    """Nobody listens."""


class Streams:
    """Streams of the simulated device.

    `on_record(stream)` is told when an event is recorded, and gives what stands for it; `on_wait(stream, recorded)` is told when
    a stream waits for such a one, with a stream of None when the host does.
    """

    def __init__(self) -> None:
        self._count = 0
        self.on_record: Callable[[int], Any] = _nobody
        self.on_wait: Callable[[int | None, Any], None] = _nobody
        self.default = self.make()
        self.current = self.default

    def make(self, *_: Any, **__: Any) -> FakeStream:
        """A new stream, as `torch.cuda.Stream()` gives it."""
        self._count += 1
        return FakeStream(self, self._count - 1)

    def event(self, *_: Any, **__: Any) -> FakeEvent:
        """A new event, as `torch.cuda.Event()` gives it."""
        return FakeEvent(self)


class FakeStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self.stream_id, self.cuda_stream = streams, number, number
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, CUDA
        self._before: list[FakeStream] = []

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: FakeStream) -> None:
        stream.record_event().wait(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or self._streams.event()
        event.record(self)
        return event

    def __enter__(self) -> FakeStream:
        self._before.append(self._streams.current)
        self._streams.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self._streams.current = self._before.pop()


class FakeEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._recorded = streams, None

    def record(self, stream: FakeStream | None = None) -> None:
        self._recorded = self._streams.on_record((stream or self._streams.current).stream_id)

    def wait(self, stream: FakeStream | None = None) -> None:
        self._streams.on_wait((stream or self._streams.current).stream_id, self._recorded)

    def synchronize(self) -> None:
        self._streams.on_wait(None, self._recorded)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0
