"""How long calls take on a device: medians of samples, by the device's own clock, with the host kept ahead of it; and how the
time that there is for measuring is spent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch

Call = Callable[[], object]
Agree = Callable[[float], float]
"""the most of a number over all ranks"""
Left = Callable[[], float]
"""seconds that are left, the same on all ranks"""
Item = TypeVar("Item")
Found = TypeVar("Found")

SAMPLE_S = 2e-3  # shorter calls are repeated until a sample lasts about so long
MOST_CALLS = 10  # a sample's; more of them would not be launched in time, see [Note: ahead]
LEAST_SAMPLES, MOST_SAMPLES = 3, 15
ROUNDS_AHEAD = 4  # that the host launches before it waits
AHEAD_DIM = 8192  # the product of two such matrices takes an H100 1.5 ms


class Stopwatch:
    """Times calls on one device; all ranks make the same calls.

    [Note: ahead] A GPU is done with a short kernel before the host has launched the next one. So a sample first gives the GPU
    large products; while it computes them, the host launches all calls of the sample, which then run back to back. That keeps
    the GPU hot as well. One call that is not counted comes in between: ranks of a collective begin the counted ones together.
    """

    def __init__(self, device: torch.device, agree: Agree) -> None:
        self.device, self.agree = device, agree
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream()
        self._is_gpu = device.type == "cuda"
        self._large = (
            torch.randn(AHEAD_DIM, AHEAD_DIM, dtype=torch.bfloat16, device=device) if self._is_gpu else None
        )
        self._ahead_s = agree(self._time_ahead())

    def heat(self, seconds: float) -> None:
        """Keep a GPU busy for so long: when its power is capped it is up to a fifth too fast in its first seconds."""
        end = time.monotonic() + seconds
        while self._is_gpu and time.monotonic() < end:
            self._get_ahead()
            self.wait()

    def median(self, call: Call, left_s: float) -> float:
        """Seconds of a call, the median of as many samples as `left_s` allows, and of LEAST_SAMPLES at least."""
        one_s = max(self.agree(self.sample(call, 1)), 1e-7)
        times = clamped(SAMPLE_S / one_s, 1, MOST_CALLS)
        samples = clamped(left_s / ((times + 1) * one_s + self._ahead_s), LEAST_SAMPLES, MOST_SAMPLES)
        return statistics.median(self.sample(call, times) for _ in range(samples))

    def sample(self, call: Call, times: int, beside: Call | None = None) -> float:
        """Seconds of a call, the mean of `times` in a row; `beside` launches what runs on another stream meanwhile."""
        if self._is_gpu:
            return self._sample_by_events(call, times, beside)
        if beside is not None:
            self._launch_aside(beside)
        call()
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times

    def sustained(self, calls: Sequence[Call], seconds: float) -> float:
        """Seconds of all calls of a GPU together, again and again without a pause, in the second half of so many seconds."""
        ends: list[torch.cuda.Event] = []
        until = time.monotonic() + seconds
        while len(ends) < LEAST_SAMPLES or time.monotonic() < until:
            for call in calls:
                call()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if len(ends) > ROUNDS_AHEAD:
                ends[-ROUNDS_AHEAD].synchronize()
        self.wait()
        middle = len(ends) // 2
        return ends[middle].elapsed_time(ends[-1]) / 1000 / (len(ends) - 1 - middle)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        self._module.synchronize()

    def _sample_by_events(self, call: Call, times: int, beside: Call | None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._get_ahead()
        if beside is not None:
            self._launch_aside(beside)
        call()
        start.record()
        for _ in range(times):
            call()
        end.record()
        self.wait()
        return start.elapsed_time(end) / 1000 / times

    def _launch_aside(self, work: Call) -> None:
        """On the other stream, from the moment at which the work that was launched before is done."""
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            work()

    def _get_ahead(self) -> None:
        if self._large is not None:
            for _ in range(2):
                torch.mm(self._large, self._large)

    def _time_ahead(self) -> float:
        self._get_ahead()  # chooses the kernel
        self.wait()
        began = time.perf_counter()
        self._get_ahead()
        self.wait()
        return time.perf_counter() - began


class Part(NamedTuple):
    """Something that is measured, and its share of the time."""

    name: str
    weight: float
    measure: Callable[[Left], None]
    """is told how many seconds are left to it"""


def take_turns(
    parts: Iterable[Part], seconds: float, agree: Agree, on_part: Callable[[str, float], None]
) -> None:
    """Measure parts one after the other; what one leaves or takes too much is shared by those after it.

    Args:
        on_part: told the name of each part and the seconds that it may take.
    """
    end, waiting = time.monotonic() + seconds, list(parts)
    while waiting:
        share = waiting[0].weight / sum(part.weight for part in waiting)
        part, now = waiting.pop(0), time.monotonic()
        until = now + max(0.0, end - now) * share
        on_part(part.name, until - now)
        part.measure(lambda until=until: agree(until - time.monotonic()))


def visit(
    items: Sequence[Item], measure: Callable[[Item, float], Found], left_s: Left
) -> list[tuple[Item, Found]]:
    """Measure items until no time is left, the first one always: coarsely first, then those between.

    Args:
        measure: is given an item and the seconds that it may take.

    Returns:
        the items that were measured, in their order.
    """
    found: dict[int, Found] = {}
    for at in coarse_first(len(items)):
        left = left_s()
        if found and left <= 0:
            break
        found[at] = measure(items[at], left / (len(items) - len(found)))
    return [(items[at], found[at]) for at in sorted(found)]


def coarse_first(count: int) -> list[int]:
    """The first and the last of `count` numbers, then again and again the middles: whatever is left out, no large gap is.

    Example:
        >>> coarse_first(6)
        [0, 5, 2, 1, 3, 4]
    """
    order, gaps = [0, count - 1][:count], [(0, count - 1)]
    for low, high in gaps:  # grows meanwhile
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def clamped(value: float, least: int, most: int) -> int:
    """A whole number of at least `value`, within bounds."""
    return min(max(math.ceil(value), least), most)
