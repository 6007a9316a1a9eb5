"""A stand-in for the module pynvml: GPUs whose health a test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


NOT_SUPPORTED, TIMEOUT, LOST = 3, 10, 15


@dataclass
class Gpu:
    """One GPU; what is None it does not tell."""

    temperature: int = 60
    clock: int | None = 1980
    busy: int = 99
    reasons: int = 0
    ecc: int | None = 0
    remapped: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    lost: bool = False
    xids: list[int] = field(default_factory=list)


class FakeNvml:
    """What `Nvml` asks of pynvml."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - pynvml's name

    def __init__(self, gpus: list[Gpu], *, tells_xids: bool = True) -> None:
        self.gpus, self.tells_xids, self.open = gpus, tells_xids, 0
        self.registered: list[int] = []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"pynvml.{name} is not known here")

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle:04d}-abcd"

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._of(handle).temperature

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._said(self._of(handle).clock)

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        self._of(handle)
        return 1980

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._of(handle).busy)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._of(handle).reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: int, error: int, counter: int) -> int:
        assert (error, counter) == (1, 0)
        return self._said(self._of(handle).ecc)

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return self._said(self._of(handle).remapped)

    def nvmlEventSetCreate(self) -> str:
        if not self.tells_xids:
            raise NVMLError(NOT_SUPPORTED)
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:
        assert events == "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "events")
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        for handle, gpu in enumerate(self.gpus):
            if gpu.xids and handle in self.registered:
                return SimpleNamespace(device=handle, eventData=gpu.xids.pop(0))
        raise NVMLError(TIMEOUT)

    def _of(self, handle: int) -> Gpu:
        if self.gpus[handle].lost:
            raise NVMLError(LOST)
        return self.gpus[handle]

    @staticmethod
    def _said(value: Any) -> Any:
        if value is None:
            raise NVMLError(NOT_SUPPORTED)
        return value
