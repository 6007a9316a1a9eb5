"""`open_nvml`: what NVIDIA's management library says of the GPUs of this machine (needs nvidia-ml-py, shoal[gpu])."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

GONE = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
TIMEOUT_MS = 1  # of a look for events, which are there or not


class Reading(NamedTuple):
    """One GPU at one time; None where it does not say."""

    gpu: int
    """as nvidia-smi counts"""
    temperature_c: int | None = None
    clock_mhz: int | None = None
    most_mhz: int | None = None
    busy: int | None = None
    """percent of the last moment in which a kernel ran"""
    slowed_by: int = 0
    """bits: why the clock is not higher, `SLOWED` in `health`"""
    uncorrected: int | None = None
    """memory errors that ECC could not correct, since the driver was loaded"""
    remap_pending: bool = False
    remap_failed: bool = False
    gone: bool = False
    """off the bus, or useless until it is reset"""


class Nvml:
    """The library, begun.

    Args:
        library: the module `pynvml`, or what looks like it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        library.nvmlInit()
        self._handles = [
            library.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(library.nvmlDeviceGetCount())
        ]
        self._events: Any = None

    @property
    def count(self) -> int:
        return len(self._handles)

    def uuid(self, gpu: int) -> str:
        """Its name for good."""
        found = self._library.nvmlDeviceGetUUID(self._handles[gpu])
        return found.decode() if isinstance(found, bytes) else found

    def read(self, gpu: int) -> Reading:
        """How a GPU is."""
        library, handle = self._library, self._handles[gpu]
        try:
            rates = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
            remapped = self._ask(library.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
            ecc = (library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC)
            return Reading(
                gpu,
                self._ask(library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
                self._ask(library.nvmlDeviceGetClockInfo, handle, library.NVML_CLOCK_SM),
                self._ask(library.nvmlDeviceGetMaxClockInfo, handle, library.NVML_CLOCK_SM),
                rates.gpu if rates is not None else None,
                # the name that all drivers know
                self._ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0,
                self._ask(library.nvmlDeviceGetTotalEccErrors, handle, *ecc),
                bool(remapped[2]),
                bool(remapped[3]),
            )
        except library.NVMLError:
            return Reading(gpu, gone=True)

    def watch_xids(self, gpus: Sequence[int]) -> None:
        """Have `xids` tell of these GPUs from now on, as far as the driver allows it."""
        library = self._library
        with suppress(library.NVMLError):
            self._events = library.nvmlEventSetCreate()
        for gpu in gpus if self._events is not None else ():
            with suppress(library.NVMLError):
                library.nvmlDeviceRegisterEvents(
                    self._handles[gpu], library.nvmlEventTypeXidCriticalError, self._events
                )

    def xids(self) -> list[tuple[int, int]]:
        """(GPU, Xid) of the driver's errors since the last call."""
        library, found = self._library, []
        while self._events is not None:
            try:
                data = library.nvmlEventSetWait_v2(self._events, TIMEOUT_MS)
                found.append((library.nvmlDeviceGetIndex(data.device), int(data.eventData)))
            except library.NVMLError:  # a timeout: there are no more
                break
        return found

    def close(self) -> None:
        with suppress(self._library.NVMLError):
            if self._events is not None:
                self._library.nvmlEventSetFree(self._events)
            self._library.nvmlShutdown()

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        """The answer; None where this GPU or driver has none."""
        try:
            return question(*about)
        except self._library.NVMLError as error:
            if getattr(error, "value", None) in GONE:
                raise
            return None


def open_nvml() -> Nvml | None:
    """The library of this machine; None without it, or without a driver."""
    try:
        import pynvml  # pyrefly: ignore[missing-import]
    except ImportError:
        return None
    try:
        return Nvml(pynvml)
    except pynvml.NVMLError:
        return None
