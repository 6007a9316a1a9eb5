"""A step's time from the records of its ranks: what they launched is gone through again, against clocks of the host, of the
device's streams and of its links.

The host launches in order; a stream runs in order; collectives share a rank's link one after another; kernels and collectives
that run at once are slower by what the profile says. A message arrives when both sides have come to it. So overlap, exposed
communication, bubbles of a pipeline and waiting for the host are results and no settings.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shoal.planner.cost import Costs
from shoal.planner.launch import Launch
from shoal.planner.trace import Trace

COMPUTING = 0  # the stream on which a model computes
COUNTED = 1  # the step that counts: in the first, memory is allocated and kernels are chosen
SHARED = 0.5  # of its time that a kernel takes from those of another stream: of 87 ms of copies in an 8B step 40 were hidden


class Part(StrEnum):
    """What the computing stream does, or waits for."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MOVES = "elementwise, norms, copies"
    UPDATE = "optimizer and clipping"
    EXPOSED = "communication, exposed"
    BUBBLE = "waiting for other stages"
    HOST = "waiting for the host"


class Span(NamedTuple):
    """A piece of a rank's timeline."""

    rank: int
    lane: str
    """"compute" or "communication" """
    name: str
    """the block, or what is sent"""
    phase: str
    micro_batch: int | None
    begin_s: float
    end_s: float


class RankTime(NamedTuple):
    """One rank's step."""

    rank: int
    parts: dict[Part, float]
    """seconds; they add up to the step"""
    communication_s: float
    """of collectives and messages, hidden or not"""
    spans: list[Span]


class StepTime(NamedTuple):
    """A step of all ranks, which begins on all at once."""

    seconds: float
    ranks: list[RankTime]
    per_micro_batch_s: float
    """what one more micro-batch would add"""


class StuckError(RuntimeError):
    """Ranks wait for messages that nobody sends."""


def replay(
    traces: dict[int, Trace], costs: Costs, micro_batches: int = 1, *, as_graph: bool = False
) -> StepTime:
    """Time the counted step of ranks that were simulated, such as one of each place in a pipeline.

    Args:
        micro_batches: that were recorded.
        as_graph: forward and backward are one launch of a CUDA graph.

    Raises:
        StuckError: messages do not match.
    """
    post = _Post()
    known = frozenset(traces)
    ranks = [_Rank(rank, trace, costs, post, known, as_graph) for rank, trace in traces.items()]
    waiting = deque(ranks)
    idle = 0
    while waiting:
        rank = waiting.popleft()
        moved = rank.advance()
        if not rank.done:
            waiting.append(rank)
        idle = 0 if moved else idle + 1
        if waiting and idle > len(waiting):
            raise StuckError(
                f"ranks {sorted(each.rank for each in waiting)} wait for messages that nobody sends"
            )
    seconds = max(rank.end for rank in ranks)
    return StepTime(
        seconds,
        [rank.found(seconds) for rank in ranks],
        max(rank.per_micro_batch(micro_batches) for rank in ranks),
    )


class _Post:
    """Messages between ranks: the n-th that one sends to another is the n-th that the other one receives."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int, str], list[float]] = defaultdict(list)

    def hand_in(self, source: int, target: int, side: str, at: float) -> int:
        """One side has come; its number."""
        begun = self._begun[source, target, side]
        begun.append(at)
        return len(begun) - 1

    def begin(self, source: int, target: int, number: int) -> float | None:
        """When both sides had come; None if one has not."""
        sent, received = self._begun[source, target, "send"], self._begun[source, target, "receive"]
        if len(sent) <= number or len(received) <= number:
            return None
        return max(sent[number], received[number])


@dataclass(eq=False)
class _Rank:
    rank: int
    trace: Trace
    costs: Costs
    post: _Post
    known: frozenset[int]
    """ranks that are replayed; messages to others arrive when they are sent"""
    as_graph: bool = False

    def __post_init__(self) -> None:
        self._queue = [launch for launch in self.trace.launches() if launch.moment.step == COUNTED]
        self._at = 0
        self._host = 0.0
        self._streams: dict[int | str, float] = defaultdict(float)
        self._ended: dict[Launch, float] = {}
        self._messages: dict[Launch, tuple[int, int, int]] = {}
        self._links: dict[bool, float] = defaultdict(float)
        self._slows = 0.0  # until when a collective takes multiprocessors from what computes
        self._parts: dict[Part, float] = defaultdict(float)
        self._communication = 0.0
        self._lanes = _Lanes(self.rank)
        self._on_gpu = self.costs.on_gpu

    @property
    def done(self) -> bool:
        return self._at == len(self._queue)

    @property
    def end(self) -> float:
        """When the device has done all."""
        return max([self._host if self._on_gpu else 0.0, *self._streams.values()])

    def advance(self) -> bool:
        """Go on until the end, or something that has not come; whether anything was done."""
        before = self._at
        while not self.done and self._step(self._queue[self._at]):
            self._at += 1
        return self._at > before

    def _step(self, launch: Launch) -> bool:
        """One launch; False if it has to wait for another rank."""
        if launch.kind in ("wait", "sync"):
            return self._wait(launch)
        self._host += self._launching(launch)
        if launch.kind == "record":
            self._ended[launch] = self._streams[launch.stream]
        elif launch.kind in ("send", "receive"):
            self._message(launch)
        elif launch.kind == "collective":
            self._collective(launch)
        elif launch.kind != "call":
            self._kernel(launch)
        return True

    def _launching(self, launch: Launch) -> float:
        host = self.costs.host
        if not self._on_gpu or launch.kind == "record" or launch.follows:
            return 0.0
        if self.as_graph and launch.moment.phase in ("forward", "backward"):
            return 0.0
        if launch.kind == "call":
            return host.graph_s
        if launch.kind in ("collective", "send", "receive"):
            return host.collective_s
        return host.kernel_s if launch.compiled else host.operator_s

    def _wait(self, launch: Launch) -> bool:
        on = launch.on
        if on is None or on.moment.step < COUNTED:
            return True
        at = self._end_of(on)
        if at is None:
            return False
        if launch.kind == "sync":
            self._host = max(self._host, at)
        elif at > self._streams[launch.stream]:
            if launch.stream == COMPUTING:
                begin = max(self._streams[COMPUTING], min(self._host, at))
                self._gap(begin)
                self._parts[self._for_others if self._is_message(on) else Part.EXPOSED] += at - begin
            self._streams[launch.stream] = at
        return True

    @property
    def _for_others(self) -> Part:
        """What it is to wait for messages: a pipeline's ranks are replayed together, those of a ring are not."""
        return Part.BUBBLE if len(self.known) > 1 else Part.EXPOSED

    def _is_message(self, on: Launch) -> bool:
        return isinstance(on.stream, str) and on.stream.startswith(("send", "receive"))

    def _end_of(self, on: Launch) -> float | None:
        found = self._ended.get(on)
        if found is not None or on not in self._messages:
            return found if found is not None else 0.0
        source, target, number = self._messages[on]
        begin = self.post.begin(source, target, number)
        if begin is None:
            return None
        seconds = self._sending(on)
        self._communication += seconds
        self._lanes.communicates(on, begin, begin + seconds)
        self._ended[on] = begin + seconds
        return self._ended[on]

    def _message(self, launch: Launch) -> None:
        other = launch.ranks[0]
        begin = max(self._host, self._streams[launch.stream])
        if other not in self.known:
            seconds = self._sending(launch)
            self._ended[launch] = begin + seconds
            self._communication += seconds
            self._lanes.communicates(launch, begin, begin + seconds)
            return
        source, target = (self.rank, other) if launch.kind == "send" else (other, self.rank)
        self._messages[launch] = source, target, self.post.hand_in(source, target, launch.kind, begin)

    def _sending(self, message: Launch) -> float:
        """Seconds of a message, which are other ones to another node."""
        return self.costs.collective(message.operator, message.nbytes, (self.rank, message.ranks[0]))

    def _collective(self, launch: Launch) -> None:
        seconds = self.costs.seconds(launch)
        far = self.costs.between_nodes(launch.ranks)
        begin = max(self._host, self._streams[launch.stream], self._links[far])
        by_copies = self.costs.by_copies(launch.operator)
        if self._streams[COMPUTING] > begin and launch.stream != COMPUTING and not by_copies:
            seconds *= self.costs.profile.beside.collectives
        end = begin + seconds
        if not by_copies:
            self._slows = max(self._slows, end)
        if launch.stream == COMPUTING:
            self._gap(begin)
            self._parts[Part.EXPOSED] += seconds
        self._links[far] = self._streams[launch.stream] = self._ended[launch] = end
        self._communication += seconds
        self._lanes.communicates(launch, begin, end)

    def _kernel(self, launch: Launch) -> None:
        seconds = self.costs.seconds(launch)
        if not self._on_gpu and not launch.follows:  # the host computes itself, between calling operators
            seconds += self.costs.host.kernel_s if launch.compiled else self.costs.host.operator_s
        begin = (
            max(self._host, self._streams[launch.stream]) if self._on_gpu else self._streams[launch.stream]
        )
        if launch.stream == COMPUTING:
            self._gap(begin)
            seconds = self._beside(begin, seconds)
            self._parts[_part_of(launch)] += seconds
            self._lanes.computes(launch, begin, begin + seconds)
        elif self._streams[COMPUTING] > begin:  # what computes meanwhile has less of the device
            taken = min(seconds, self._streams[COMPUTING] - begin) * SHARED
            self._streams[COMPUTING] += taken
            self._parts[Part.MOVES] += taken
        self._streams[launch.stream] = begin + seconds

    def _gap(self, begin: float) -> None:
        """The computing stream had nothing to do until now, since the host had not launched anything."""
        gap = begin - self._streams[COMPUTING]
        if gap > 0:
            self._parts[Part.HOST] += gap
            self._streams[COMPUTING] = begin

    def _beside(self, begin: float, seconds: float) -> float:
        """Seconds of a kernel, the part of it that runs beside a collective being slower."""
        slow = self.costs.profile.beside.computing
        together = self._slows - begin
        if together <= 0 or slow == 1.0:
            return seconds
        return seconds * slow if seconds * slow <= together else together + seconds - together / slow

    def per_micro_batch(self, recorded: int) -> float:
        """What one more micro-batch takes on this rank, of those of which there are several."""
        return self._lanes.per_micro_batch(len(self.known), recorded)

    def found(self, step_s: float) -> RankTime:
        """What came of it; until the slowest rank has ended, this one waits."""
        parts = {part: self._parts[part] for part in Part}
        rest = step_s - sum(parts.values())
        parts[self._for_others] += max(0.0, rest)
        return RankTime(self.rank, parts, self._communication, self._lanes.spans())


def _part_of(launch: Launch) -> Part:
    if launch.moment.phase in ("update", "reduce"):
        return Part.UPDATE
    return {"matmul": Part.MATMUL, "attention": Part.ATTENTION}.get(launch.kind, Part.MOVES)


@dataclass
class _Lanes:
    """Pieces of a timeline: kernels of one block in one pass are one."""

    rank: int
    _compute: list[Span] = field(default_factory=list)
    _sent: list[Span] = field(default_factory=list)
    _times: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def computes(self, launch: Launch, begin: float, end: float) -> None:
        moment = launch.moment
        phase = "backward" if moment.phase == "recompute" else moment.phase
        last = self._compute[-1] if self._compute else None
        if last is not None and (last.name, last.phase) == (moment.unit, phase):
            self._compute[-1] = last._replace(end_s=end)
            return
        number = None
        if moment.unit and phase in ("forward", "backward"):
            number = self._times[moment.unit, phase]
            self._times[moment.unit, phase] += 1
        self._compute.append(Span(self.rank, "compute", moment.unit, phase, number, begin, end))

    def communicates(self, launch: Launch, begin: float, end: float) -> None:
        moment = launch.moment
        self._sent.append(Span(self.rank, "communication", launch.operator, moment.phase, None, begin, end))

    def spans(self) -> list[Span]:
        return [*self._compute, *self._sent]

    def per_micro_batch(self, ranks: int, recorded: int) -> float:
        """From the second forward of the first block to the third; of a pipeline in its rhythm, from one to that which is as many
        later as there are ranks, since they come in groups of so many. With too few, what is computed for one.

        Args:
            ranks: of the pipeline.
        """
        work = [span for span in self._compute if span.phase in ("forward", "backward")]
        first = next((span for span in work if span.micro_batch is not None), None)
        if first is None:
            return sum(span.end_s - span.begin_s for span in work) / recorded
        starts = [span for span in work if (span.name, span.phase) == (first.name, "forward")]
        starts = starts[:recorded]  # not what sends a stage's gradients, after all of them
        backward = next((span for span in work if span.phase == "backward"), None)
        if len(starts) > 2 and backward is not None and backward.begin_s < starts[1].begin_s:
            return starts[2].begin_s - starts[1].begin_s
        if len(starts) > 3 * ranks:
            return (starts[-1].begin_s - starts[-1 - ranks].begin_s) / ranks
        return sum(span.end_s - span.begin_s for span in work) / len(starts)
