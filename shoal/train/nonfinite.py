"""Why a step was skipped: its forward and backward once more, on all ranks, watched; nothing that training depends on changes.

The same losses again, bit for bit, come from the data or the model: the first module is named whose output, or whose output's
gradient, is not finite. Another result of the same arithmetic on the same numbers is the hardware's.

[Note: the same numbers] A skipped step leaves the weights as they are, dropout is seeded by the samples' place in the run, and
the kernels are those of the first time: compiled blocks run as they are and are seen from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from shoal.data.cut import MicroBatch
from shoal.parallel.replicate import core
from shoal.tensors import tensors_in
from shoal.train.optimizer import local
from shoal.train.result import StepResult
from shoal.train.squares import sum_of_squares
from shoal.train.step import Step
from shoal.train.watch import Sight, first_bad, watched
from shoal.world.meeting import ranks_text

Kind = Literal["data", "model", "data or model", "hardware", "loss scale"]
MOST_SAMPLES = 8


class Place(NamedTuple):
    """A micro-batch of a rank."""

    rank: int
    micro_batch: int
    samples: list[int]
    """numbers in the dataset, the first MOST_SAMPLES; or in the run, where the dataset has none"""


class Cause(NamedTuple):
    """Why a step was skipped; equal on all ranks."""

    kind: Kind
    message: str
    place: Place | None = None
    module: str | None = None

    def record(self) -> dict[str, Any]:
        """What an event says of it."""
        place = self.place._asdict() if self.place else {}
        module = {"module": self.module} if self.module is not None else {}
        return {"cause": self.kind, "message": self.message, **place, **module}


class Seen(NamedTuple):
    """What one rank saw in the second pass."""

    parameter: str | None
    """that is not finite itself"""
    data: int | None
    """micro-batch whose data has something that is not finite"""
    other: int | None
    """micro-batch whose loss is another one this time"""
    sight: Sight | None
    loss: int | None
    """micro-batch whose loss is not finite"""
    gradient: str | None
    """parameter whose gradient, over all ranks, is not finite"""
    overflows: bool
    """gradients are finite, and the sum of their squares is not"""
    places: list[Place]
    """this rank's micro-batches"""


Numbers = Callable[[MicroBatch], Sequence[int]]
"""The samples of a micro-batch, by number"""


def find_cause(step: Step, result: StepResult, numbers: Numbers) -> Cause:
    """Why a step was skipped; the weights are still those that it left. Collective."""
    if result.numbers.weight == 0:
        return Cause("data", "nothing in the global batch has a label that counts")
    scale = step.loss_scale
    if scale is not None and math.isfinite(result.numbers.loss):
        return Cause(
            "loss scale", f"gradients overflowed in fp16; the loss scale is now {scale.value.item():g}"
        )
    seen = _look(step, result, numbers)
    everyone: list[Any] = [seen]
    if step.world.size > 1:
        everyone = [None] * step.world.size
        dist.all_gather_object(everyone, seen)
    return judge(everyone)


def judge(everyone: Sequence[Seen]) -> Cause:
    """The cause, from what all ranks saw."""
    for rank, seen in enumerate(everyone):
        if (name := seen.parameter) is not None:
            return Cause("model", f"on rank {rank} parameter {name} is not finite", module=name)
    if data := [seen.places[seen.data] for seen in everyone if seen.data is not None]:
        return Cause("data", f"{_in(data[0])} the data is not finite", data[0])
    again = _again(everyone)
    other = [seen.places[seen.other] for seen in everyone if seen.other is not None]
    if other and again is None:
        return _hardware(other)
    if other and again is not None:
        return again._replace(message=f"{again.message}; {_ranks(other)} gave another loss the second time")
    if again is not None:
        return again._replace(message=f"the same again: {again.message}")
    text = "losses are the same again, and gradients are finite this time: a device or a link went wrong in backward"
    return Cause("hardware", text)


def _again(everyone: Sequence[Seen]) -> Cause | None:
    """Where something was not finite the second time, if it was: in the order of execution."""
    sights = [
        (seen.sight, seen.places[seen.sight.micro_batch]) for seen in everyone if seen.sight is not None
    ]
    first = min(sights, key=_begins_first, default=None)
    losses = [seen.places[seen.loss] for seen in everyone if seen.loss is not None]
    if losses and (first is None or first[0].backward):
        text = "the loss is not finite, and the outputs of all modules that can be watched are"
        return Cause("data or model", f"{_in(losses[0])} {text}", losses[0])
    if first is not None:
        sight, place = first
        return Cause("data or model", f"{_in(place)} {sight.text}", place, sight.module)
    if names := [seen.gradient for seen in everyone if seen.gradient is not None]:
        text = f"the gradient of parameter {names[0]} is not finite, and those of modules' outputs are"
        return Cause("data or model", text, module=names[0])
    if any(seen.overflows for seen in everyone):
        return Cause("data or model", "gradients are finite, and their norm is too large for its type")
    return None


def _begins_first(found: tuple[Sight, Place]) -> tuple[bool, bool, int, int]:
    """In a pipeline what is not finite goes on to later stages in forward, and to earlier ones in backward."""
    sight, place = found
    return sight.backward, sight.inherited, place.micro_batch, -place.rank if sight.backward else place.rank


def _hardware(places: Sequence[Place]) -> Cause:
    text = (
        f"{_ranks(places)} gave another loss for the same micro-batch this time ({_in(places[0])} first): the device went wrong, "
        "unless its kernels or the model do not repeat themselves"
    )
    return Cause("hardware", text, places[0])


def _ranks(places: Sequence[Place]) -> str:
    """Ranks that share samples compute with each other's results, and are named together."""
    return ranks_text(sorted({place.rank for place in places}))


def _in(place: Place) -> str:
    shown = ", ".join(map(str, place.samples[:MOST_SAMPLES]))
    return f"on rank {place.rank} in micro-batch {place.micro_batch} (samples {shown})"


def _look(step: Step, result: StepResult, numbers: Numbers) -> Seen:
    """Take the forward and backward of a step again. Collective, but for what is found."""
    micro_batches, rank = result.batch.micro_batches, step.world.rank
    places = [
        Place(rank, index, [int(number) for number in numbers(micro)[:MOST_SAMPLES]])
        for index, micro in enumerate(micro_batches)
    ]
    bad_parameter = first_bad((name, local(p)) for name, p in core(step.model).named_parameters())
    bad_data = first_bad(
        (str(index), tensor) for index, micro in enumerate(micro_batches) for tensor in tensors_in(micro.data)
    )
    with unchanged(step):
        step.forget_recording()  # what it keeps is needed for a pass that is launched
        with watched(step) as watch:
            losses = step.forward_backward(micro_batches).losses
        gradients = {
            name: local(p.grad) for name, p in step.optimizer.parameters.items() if p.grad is not None
        }
        bad_gradient = first_bad(gradients.items())
        squares = (
            sum_of_squares(list(gradients.values()), step.world.device) if gradients else torch.zeros(())
        )
    equal = (losses == result.losses) | (losses.isnan() & result.losses.isnan())
    return Seen(
        bad_parameter,
        None if bad_data is None else int(bad_data),
        _first((~equal).tolist()),
        watch.first(),
        _first((~losses.isfinite()).tolist()),
        bad_gradient,
        bad_gradient is None and not bool(squares.isfinite()),
        places,
    )


@contextmanager
def unchanged(step: Step) -> Generator[None]:
    """Whatever runs forward and backward inside, training goes on as if it had not: buffers, gradients, random numbers."""
    owners = [
        (module, name)
        for module in core(step.model).modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
    buffers = [(module, name, module._buffers[name]) for module, name in owners]
    kept = [buffer.clone() for _, _, buffer in buffers if buffer is not None]
    aside = step.optimizer.set_gradients_aside()
    device = step.world.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(buffers, kept, strict=True):
                module._buffers[name] = buffer
                if buffer is not None:
                    buffer.copy_(value)
        step.optimizer.put_gradients_back(aside)


def _first(flags: Iterable[bool]) -> int | None:
    """Where the first true one is."""
    return next((index for index, flag in enumerate(flags) if flag), None)
