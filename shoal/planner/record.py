"""What a rank of a pipeline did in the parts of its stages' work, to be played again: for other micro-batches of it, or for other
ranks with such stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.parallel.stages import stages_of_rank
from shoal.plan import Plan
from shoal.planner.launch import Launch, Moment
from shoal.planner.stages import Part, Waiting
from shoal.planner.tape import Tape
from shoal.planner.trace import Shape, Trace

MODEL = 1  # the micro-batch from which those between it and the last are played


class NotAlikeError(Exception):
    """A record cannot be played for another micro-batch or rank."""


@dataclass(frozen=True)  # no tuple, into which pytrees would be mapped
class Given:
    """A tensor that a part gives to the schedule, which lets go of it."""

    number: int
    """of its storage"""
    shape: Shape
    requires_grad: bool


class Piece(NamedTuple):
    """What was recorded of a part: events from `begin` to `end`."""

    begin: int
    end: int
    result: Any
    """what it gave, with a `Given` for each tensor"""

    @property
    def given(self) -> set[int]:
        """Storages of its results."""
        return {leaf.number for leaf in tree_leaves(self.result) if isinstance(leaf, Given)}


@dataclass(eq=False)
class Record:
    """A rank's trace, and where its parts are."""

    rank: int
    trace: Trace
    count: int
    """of micro-batches"""
    pieces: dict[tuple[int, Part], Piece] = field(default_factory=dict)
    """by the step, too"""
    entered: list[int] = field(default_factory=list)
    """by step, the event at which its schedule began to run"""
    left: list[int] = field(default_factory=list)
    """by step, the event at which that had ended"""
    of_stages: list[range] = field(default_factory=list)
    """the blocks of all stages, of other ranks too"""
    container: str = ""
    """what has them in the model, by its path"""
    stages: WeakKeyDictionary[nn.Module, int] = field(default_factory=WeakKeyDictionary)
    """of the rank's modules, whose end is recorded, too"""
    sharded: bool = False
    """whether schedules gather stages"""

    def stage_of(self, module: nn.Module) -> int:
        """The index of the stage that has a module, -1 if none has it."""
        return self.stages.get(module, -1)

    def _outline(self, piece: Piece) -> list[Any]:
        """What a part does, whichever memory it does it with."""
        storages, events = self.trace.storages, self.trace.events[piece.begin : piece.end]
        return [
            (event.kind, event.operator, event.nbytes, event.name)
            if isinstance(event, Launch)
            else (event >= 0, storages[event if event >= 0 else ~event].nbytes)
            for event in events
        ]

    def source(self, step: int, part: Part) -> tuple[int, Part]:
        """The step and part from which one is played: all micro-batches but the first from the second in the first step."""
        return (0, part._replace(micro_batch=MODEL)) if part.micro_batch else (step, part)

    def is_played(self, step: int, part: Part) -> bool:
        """Whether a part is not simulated as it is, but played; the last micro-batch shows in later steps if that is right."""
        shows = step > 0 and part.micro_batch == self.count - 1
        return self.source(step, part) != (step, part) and not shows

    def require_alike(self, stage: int) -> None:
        """What the micro-batch that others are played from makes is only for itself.

        Raises:
            NotAlikeError: it keeps something, or frees what it has not made.
        """
        pieces = [self.pieces[0, Part(kind, stage, MODEL)] for kind in ("forward", "backward")]
        made, ended = set[int](), set[int]()
        for piece in pieces:
            events = [event for event in self.trace.events[piece.begin : piece.end] if isinstance(event, int)]
            made |= {event for event in events if event >= 0} - piece.given
            ended |= {~event for event in events if event < 0}
        if made != ended:
            raise NotAlikeError

    def require_whole(self) -> None:
        """Between its parts, a schedule lets go of nothing but what it made itself or was given.

        Raises:
            NotAlikeError: it does, or the last micro-batch is not like the second.
        """
        for (step, part), piece in self.pieces.items():
            if step > 0 and part.micro_batch == self.count - 1:
                model = self.pieces[0, part._replace(micro_batch=MODEL)]
                if self._outline(piece) != self._outline(model):
                    raise NotAlikeError
        inside = bytearray(len(self.trace.events))
        own = set[int]()
        for piece in self.pieces.values():
            inside[piece.begin : piece.end] = b"x" * (piece.end - piece.begin)
            own |= piece.given
        for begin, end in zip(self.entered, self.left, strict=True):
            for index in range(begin, end):
                event = self.trace.events[index]
                if inside[index] or not isinstance(event, int):
                    continue
                if event >= 0:
                    own.add(event)
                elif ~event not in own:
                    raise NotAlikeError


@dataclass(eq=False)
class _Scope:
    """What a micro-batch made on a stage, or all of them: storages and launches of a record, and those played for them."""

    numbers: dict[int, int] = field(default_factory=dict)
    launches: dict[Launch, Launch] = field(default_factory=dict)


class Moved(NamedTuple):
    """Names and ranks of one place in the pipeline as those of another."""

    offset: int
    place: range
    """ranks of the record's place in the pipeline"""
    prefix: str
    """of the blocks' names, with a dot"""
    blocks: dict[str, str]
    """by their place in the model, the record's as those that they are now"""
    stages: dict[int, int]
    """the other way round"""

    @classmethod
    def between(cls, record: Record, rank: int, plan: Plan) -> Moved:
        """From a record's rank to another one."""
        old, new = (stages_of_rank(plan, plan.coordinates(each)["pipeline"]) for each in (record.rank, rank))
        before, after = (
            [str(block) for stage in each for block in record.of_stages[stage]] for each in (old, new)
        )
        each = plan.world_size // plan.pipeline
        place = range(record.rank // each * each, (record.rank // each + 1) * each)
        blocks, stages = dict(zip(before, after, strict=True)), dict(zip(new, old, strict=True))
        return cls(rank - record.rank, place, f"{record.container}.", blocks, stages)

    def name(self, name: str) -> str:
        """Of a block, or of something in one."""
        if not name.startswith(self.prefix):
            return name
        block, dot, rest = name[len(self.prefix) :].partition(".")
        return f"{self.prefix}{self.blocks.get(block, block)}{dot}{rest}"

    def ranks(self, launch: Launch) -> tuple[int, ...]:
        """Who takes part: of a message the neighbour, of a collective another group if it lies in one place of the pipeline."""
        message = launch.kind in ("send", "receive")
        if not message and not all(rank in self.place for rank in launch.ranks):
            return launch.ranks
        return tuple(rank + self.offset for rank in launch.ranks)


class Player:
    """Plays parts of a record into a tape."""

    def __init__(self, record: Record, tape: Tape, moved: Moved | None = None) -> None:
        self._record, self._tape, self._moved = record, tape, moved
        self._moments: dict[tuple[Moment, int], Moment] = {}
        self._own: dict[tuple[int, int], _Scope] = {}
        """of micro-batches that are played from the second's, by their stage, too"""
        self.scope = _Scope()
        """of all else"""
        self._beginning = False

    def around(self, part: Part, do: Callable[[], Any]) -> Any:
        """Instead of a part of the work of a stage that has nothing in it."""
        if self._beginning:
            return None
        if part.kind == "begin":
            self._beginning = True
            with self._tape.muted():
                do()
            self._beginning = False
        made = self.part(part)
        return Waiting(lambda: None) if part.kind == "gather" else made

    def part(self, part: Part) -> Any:
        """Play a part.

        Raises:
            NotAlikeError: it was not recorded, or needs what is not there.
        """
        scope, micro_batch = self.scope, part.micro_batch
        if micro_batch:
            scope = self._own.setdefault((part.stage, micro_batch), _Scope())
            if part.kind == "backward":
                del self._own[part.stage, micro_batch]
        there = part._replace(stage=self._moved.stages.get(part.stage, part.stage)) if self._moved else part
        step = self._tape.now().step
        source = self._record.source(step, there)
        piece = self._record.pieces.get(source)
        if piece is None:
            raise NotAlikeError
        made = self.play(piece.begin, piece.end, scope, piece.result, later=step - source[0])
        return tree_map_only(Given, lambda given: made[given.number], piece.result)

    def play(
        self,
        begin: int,
        end: int,
        scope: _Scope,
        result: Any = None,
        *,
        later: int = 0,
        strict: bool = True,
    ) -> dict[int, Tensor]:
        """Play events; the tensors that they give, by the numbers of their storages in the record.

        Args:
            later: by so many steps.
            strict: False: storages that are not there were the schedule's, which has its own.
        """
        source = self._record.trace
        given = {leaf.number: leaf for leaf in tree_leaves(result) if isinstance(leaf, Given)}
        made: dict[int, Tensor] = {}
        for index in range(begin, end):
            event, moment = source.events[index], self._moment(source.moments[index], later)
            if isinstance(event, Launch):
                self._tape.add(self._launch(event, moment, scope, strict=strict))
            elif event in given:
                shape = given[event].shape
                made[event] = self._tape.place(shape, source.storages[event].operator, moment)
                made[event].requires_grad_(given[event].requires_grad)
            elif event >= 0:
                storage = source.storages[event]
                scope.numbers[event] = self._tape.take(storage.again(moment, self._name(storage.name)))
            else:
                owner = scope if ~event in scope.numbers else self.scope
                if ~event in owner.numbers:
                    self._tape.release(owner.numbers.pop(~event), moment)
                elif strict:
                    raise NotAlikeError
        return made

    def _launch(self, launch: Launch, moment: Moment, scope: _Scope, *, strict: bool) -> Launch:
        on = launch.on
        if on is not None:
            found = scope.launches.get(on) or self.scope.launches.get(on)
            if found is None and self._moved is not None and strict:
                raise NotAlikeError
            on = found or (on if self._moved is None else None)
        ranks = launch.ranks if self._moved is None else self._moved.ranks(launch)
        new = launch.again(moment, self._name(launch.name), ranks, on)
        new.made = -1  # a number of the record's
        scope.launches[launch] = new
        return new

    def _moment(self, moment: Moment, later: int) -> Moment:
        if self._moved is None and not later:
            return moment
        key = moment, later
        if key not in self._moments:
            self._moments[key] = moment._replace(step=moment.step + later, unit=self._name(moment.unit))
        return self._moments[key]

    def _name(self, name: str) -> str:
        return name if self._moved is None else self._moved.name(name)


class Recorder:
    """Notes where the parts of a rank's stages are in its trace, and plays those that are like another one.

    Args:
        received_bytes: of what comes from another stage.
        left_out: micro-batches of the step that are not simulated.
    """

    def __init__(self, record: Record, tape: Tape, received_bytes: int, left_out: int) -> None:
        self._record, self._tape, self._player = record, tape, Player(record, tape)
        self._received_bytes, self._left_out = received_bytes, left_out
        self._inside = False

    def around(self, part: Part, do: Callable[[], Any]) -> Any:
        """Do a part of a stage's work, or play it."""
        step = self._tape.now().step
        if self._record.is_played(step, part):
            return self._player.part(part)
        if self._inside or len(self._record.entered) == len(self._record.left):  # or no schedule runs
            return do()
        self._inside = True
        result = self._do(step, part, do)
        self._inside = False
        return result

    def _do(self, step: int, part: Part, do: Callable[[], Any]) -> Any:
        trace, pieces = self._record.trace, self._record.pieces
        begin, before = len(trace.events), len(trace.storages)
        result, given = do(), None
        if part.kind == "begin":
            take_received(self._tape, begin, self._received_bytes, self._record.count, self._left_out)
        elif part.kind in ("forward", "backward"):
            given = tree_map_only(Tensor, lambda tensor: self._given(tensor, before), result)
        elif (step, part) in pieces:  # modules of a stage are gathered one by one
            if pieces[step, part].end != begin:
                raise NotAlikeError
            begin = pieces[step, part].begin
        pieces[step, part] = Piece(begin, len(trace.events), given)
        if part.kind == "backward" and part.micro_batch == MODEL:
            self._record.require_alike(part.stage)
        return result

    def _given(self, tensor: Tensor, before: int) -> Given:
        number, shape = self._tape.number(tensor), Shape.of(tensor)
        if number is None or number < before or tensor.untyped_storage().nbytes() != shape.nbytes:
            raise NotAlikeError
        return Given(number, shape, tensor.requires_grad)


def take_received(tape: Tape, begin: int, nbytes: int, simulated: int, left_out: int) -> None:
    """A schedule has memory for each micro-batch that it will receive: take that of micro-batches that are left out.

    Args:
        begin: the event at which the schedule began to take it.
        nbytes: of what comes from another stage.
    """
    storages = tape.trace.storages
    here = [event for event in tape.trace.events[begin:] if isinstance(event, int) and event >= 0]
    kept = [number for number in here if storages[number].ended is None and storages[number].nbytes == nbytes]
    for _ in range(len(kept) // simulated * left_out):
        tape.take(storages[kept[-1]].again(tape.now(), storages[kept[-1]].name))
