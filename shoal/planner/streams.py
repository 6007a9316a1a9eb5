"""Streams and events of a simulated device. Nothing runs on them: they say which pool of memory a tensor is from."""

from __future__ import annotations

from typing import Any

import torch

CUDA = 1  # c10::DeviceType


class Streams:
    """Streams of the simulated device. Nothing runs on them: they say which pool of memory a tensor is from."""

    def __init__(self) -> None:
        self._count = 0
        self.default = self.make()
        self.current = self.default

    def make(self, *_: Any, **__: Any) -> FakeStream:
        self._count += 1
        return FakeStream(self, self._count - 1)


class FakeStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self.stream_id, self.cuda_stream = streams, number, number
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, CUDA
        self._before: list[FakeStream] = []

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def __enter__(self) -> FakeStream:
        self._before.append(self._streams.current)
        self._streams.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self._streams.current = self._before.pop()


class FakeEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0
