"""The fused update of tensors that live in host memory: brought to the device bucket by bucket, updated there, and sent back.

The elements of all parts lie in a row, which is cut into buckets of equal size; a large part has pieces in several. While the
device updates one bucket, the next one comes and the last one goes. An update is element by element, and its kernels are those
that update what is on the device, so the bits are the same.

[Note: no wait] The host waits for nothing. Each bucket has one of three places on the device, and what comes into a place waits
for what leaves it. After the last bucket the device's own stream waits for all copies: what it does next sees the new values, as
do copies that are ordered after it. The host sees them after `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.job import Optimizer
from shoal.parallel.host import Lane, Mark, host_zeros, settle
from shoal.train.fused import kinds, make, update

BUCKET_BYTES = 256 * 2**20  # long enough for the full rate of a link, short against the device's memory
PLACES = 3  # one comes, one is updated, one goes
ALIGNED = 64  # elements: pieces begin where vectorised kernels can read


class Piece(NamedTuple):
    """Elements of one part that are in one bucket."""

    name: str
    first: int
    last: int
    """in the part, flat"""
    at: int
    """where they begin in the bucket"""
    ends: bool
    """the part's last piece"""

    @property
    def in_part(self) -> slice:
        return slice(self.first, self.last)

    @property
    def in_bucket(self) -> slice:
        return slice(self.at, self.at + self.last - self.first)


@dataclass(eq=False)
class Bucket:
    """Pieces that are updated by one call of a torch optimizer, which holds a stand-in for each of them."""

    first: int
    """of its elements, in the row of all"""
    pieces: list[Piece] = field(default_factory=list)
    stands: dict[str, nn.Parameter] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    arrived: Mark = field(default_factory=Mark)
    left: Mark = field(default_factory=Mark)

    @property
    def length(self) -> int:
        return max((piece.in_bucket.stop for piece in self.pieces), default=0)


Place = dict[str, Tensor]
"""Device memory for one bucket: a row for each kind of moment, "parameter" and "gradient", as far as they are brought"""


class Streamed:
    """A torch optimizer over `parts` of which some tensors are in host memory.

    Args:
        parameters: the whole parameters that parts belong to, by name.
        parts: this rank's; those that are not on `device` are brought with their gradients.
        moments: keep moments in host memory.
        bring_all: bring parts that are on `device`, too: on a CPU host memory is the device's.
        bucket_bytes: brought at a time; left out, 256 MiB.
    """

    def __init__(
        self,
        settings: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        parts: Mapping[str, nn.Parameter],
        device: torch.device,
        *,
        moments: bool,
        bring_all: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self._parts, self._device, self._kinds = parts, device, kinds(settings)
        self._brought = {name for name, part in parts.items() if bring_all or part.device != device}
        self._dtype = next(iter(parts.values())).dtype  # masters are all of one type
        self._rows = [
            *(self._kinds if moments else ()),
            *(("parameter", "gradient") if self._brought else ()),
        ]
        element = max(1, len(self._rows)) * self._dtype.itemsize
        self._size = max(1, (bucket_bytes or BUCKET_BYTES) // element // ALIGNED) * ALIGNED
        self._starts, self._buckets = _cut(parts, self._size)
        total = self._buckets[-1].first + self._buckets[-1].length
        self._moments = {kind: self._zeros(total, moments) for kind in self._kinds}
        self._steps = (
            {name: torch.zeros((), dtype=torch.float32, device=device) for name in parts}
            if settings.name == "adamw"
            else {}
        )
        for bucket in self._buckets:
            bucket.stands = {piece.name: self._stand_in() for piece in bucket.pieces}
            bucket.optimizer = make(settings, parameters, bucket.stands)
        self._come, self._go = Lane(device), Lane(device)

    def step(self, lr: float, divide_by: Tensor, skip: Tensor) -> None:
        """As `fused.update`, of the gradients that parts have."""
        places = [self._place() for _ in range(min(PLACES, len(self._buckets)))]
        self._bring(0, places)
        for index, bucket in enumerate(self._buckets):
            if index + 1 < len(self._buckets):
                self._bring(index + 1, places)
            bucket.arrived.wait()
            place = places[index % PLACES]
            self._update(bucket, place, lr, divide_by, skip)
            self._send(bucket, place)
        for bucket in self._buckets[-PLACES:]:
            bucket.left.wait()

    def state_of(self, name: str) -> dict[str, Tensor]:
        """The state of a part, in place, where it is kept."""
        settle(self._device)
        part, start = self._parts[name], self._starts[name]
        state = {
            kind: row[start : start + part.numel()].view(part.shape) for kind, row in self._moments.items()
        }
        return state | ({"step": self._steps[name]} if self._steps else {})

    def held(self) -> list[Tensor]:
        """State tensors, wherever they are."""
        return [*self._moments.values(), *self._steps.values()]

    def _zeros(self, count: int, on_host: bool) -> Tensor:
        if on_host:
            return host_zeros(count, self._dtype, self._device)
        return torch.zeros(count, dtype=self._dtype, device=self._device)

    def _stand_in(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(0, dtype=self._dtype, device=self._device))

    def _place(self) -> Place:
        size = min(self._size, max(bucket.length for bucket in self._buckets))
        rows = torch.empty(len(self._rows), size, dtype=self._dtype, device=self._device)
        return dict(zip(self._rows, rows, strict=True))

    def _bring(self, index: int, places: list[Place]) -> None:
        """Begin to copy a bucket into its place, once what was in the place has left it."""
        bucket, place = self._buckets[index], places[index % PLACES]
        with self._come.run():
            if index >= PLACES:
                self._buckets[index - PLACES].left.wait()
            for kind in self._kinds:
                if kind in place:
                    place[kind][: bucket.length].copy_(self._in_row(kind, bucket), non_blocking=True)
            for piece in self._brought_of(bucket):
                part = self._parts[piece.name]
                for row, source in (("parameter", part.detach()), ("gradient", part.grad)):
                    if source is not None:
                        place[row][piece.in_bucket].copy_(
                            source.reshape(-1)[piece.in_part], non_blocking=True
                        )
        bucket.arrived = self._come.mark()

    def _send(self, bucket: Bucket, place: Place) -> None:
        """Begin to copy what the update changed back into host memory."""
        with self._go.run():
            for kind in self._kinds:
                if kind in place:
                    self._in_row(kind, bucket).copy_(place[kind][: bucket.length], non_blocking=True)
            for piece in self._brought_of(bucket):
                part = self._parts[piece.name].detach().view(-1)
                part[piece.in_part].copy_(place["parameter"][piece.in_bucket], non_blocking=True)
        bucket.left = self._go.mark()

    def _update(self, bucket: Bucket, place: Place, lr: float, divide_by: Tensor, skip: Tensor) -> None:
        assert bucket.optimizer is not None
        for piece in bucket.pieces:
            self._put(bucket, piece, place)
        update(bucket.optimizer, lr, divide_by, skip)
        for stand in bucket.stands.values():  # so that a place is given back, and no gradient is kept
            stand.grad = None
            stand.data = torch.empty(0, dtype=self._dtype, device=self._device)
        bucket.optimizer.state.clear()

    def _put(self, bucket: Bucket, piece: Piece, place: Place) -> None:
        """Make the stand-in of a piece, and its state, the memory that is to be updated."""
        stand, part = bucket.stands[piece.name], self._parts[piece.name]
        if piece.name in self._brought:
            stand.data = place["parameter"][piece.in_bucket]
            stand.grad = place["gradient"][piece.in_bucket] if part.grad is not None else None
        else:
            stand.data = part.detach().view(-1)[piece.in_part]
            stand.grad = part.grad.reshape(-1)[piece.in_part] if part.grad is not None else None
        state: dict[str, Tensor] = {
            kind: (place[kind] if kind in place else self._in_row(kind, bucket))[piece.in_bucket]
            for kind in self._kinds
        }
        if self._steps:  # counted once, by the last piece
            steps = self._steps[piece.name]
            state["step"] = steps if piece.ends else steps.clone()
        assert bucket.optimizer is not None
        bucket.optimizer.state[stand] = state

    def _in_row(self, kind: str, bucket: Bucket) -> Tensor:
        return self._moments[kind][bucket.first : bucket.first + bucket.length]

    def _brought_of(self, bucket: Bucket) -> list[Piece]:
        return [piece for piece in bucket.pieces if piece.name in self._brought]


def _cut(parts: Mapping[str, Tensor], size: int) -> tuple[dict[str, int], list[Bucket]]:
    """Where each part begins in the row of all, and the buckets of `size` elements that the row is cut into."""
    starts: dict[str, int] = {}
    buckets: list[Bucket] = []
    at = 0
    for name, part in parts.items():
        starts[name], first, count = at, 0, part.numel()
        while True:  # a part without elements has a piece, too: its steps are counted
            if at // size == len(buckets):
                buckets.append(Bucket(at))
            last = min(count, first + size - at % size)
            buckets[-1].pieces.append(Piece(name, first, last, at % size, last == count))
            at, first = at + last - first, last
            if first == count:
                break
        at = -(-at // ALIGNED) * ALIGNED
    return starts, buckets
