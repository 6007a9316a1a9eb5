"""torch's caching allocator of GPU memory, replayed: what a stream of requests makes of allocated and reserved memory.

Requests are rounded up to 512 bytes and served from segments that are kept for later ones, a pool for small and one for large
requests of each stream. So allocated memory is more than what was asked for, and reserved memory, that of all segments, is more
again. The allocator has no randomness, and neither has a step: fragmentation is predicted, not guessed.

Source: c10/cuda/CUDACachingAllocator.cpp, with its default settings and with expandable_segments:True.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 1 << 20
ROUND, SMALL = 512, MIB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_FROM, ROUND_LARGE = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


class Pool(NamedTuple):
    """Which blocks may serve a request."""

    small: bool
    stream: int


@dataclass(eq=False, slots=True)
class Block:
    """A range of a segment."""

    pool: Pool
    address: int
    size: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None
    grows: bool = False
    """the end of an expandable segment"""

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass
class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable: segments that grow, as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. That pages are given back when
            memory runs out is not replayed.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate("x", 3 * MIB, stream=0)
        >>> allocator.allocated // MIB, allocator.reserved // MIB
        (3, 20)
    """

    expandable: bool = False
    allocated: int = 0
    reserved: int = 0
    _free: dict[Pool, list[tuple[tuple[int, int], Block]]] = field(default_factory=lambda: defaultdict(list))
    _used: dict[object, Block] = field(default_factory=dict)
    _ends: dict[Pool, Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, key: object, nbytes: int, stream: int) -> None:
        """Serve a request; one of no bytes takes nothing."""
        if nbytes <= 0:
            return
        size = -(-nbytes // ROUND) * ROUND
        pool = Pool(size <= SMALL, stream)
        block = self._best_fit(pool, size) or (
            self._grown(pool, size) if self.expandable else self._segment(pool, size)
        )
        rest = block.size - size
        if rest >= ROUND if pool.small or self.expandable else rest > SMALL:
            self._split(block, size)
        block.free = False
        self._used[key] = block
        self.allocated += block.size

    def size_of(self, key: object) -> int:
        """What a request takes; 0 for one that took nothing."""
        block = self._used.get(key)
        return block.size if block else 0

    def free(self, key: object) -> None:
        """Take back what a request got; neighbours that are free become one block."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._withdraw(other)
                block = _joined(block, other) if other is block.after else _joined(other, block)
        if block.grows:
            self._ends[block.pool] = block
        self._offer(block)

    def give_back(self) -> None:
        """What `torch.cuda.empty_cache` does: segments without a block in use are given back, of those that grow whole pages."""
        for pool, free in self._free.items():
            page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
            kept: list[tuple[tuple[int, int], Block]] = []
            for entry in free:
                block = entry[1]
                whole = block.before is None and block.after is None
                block.free = not (
                    self.expandable or whole
                )  # what is given back is nobody's neighbour any more
                if self.expandable:
                    begin, end = -(-block.address // page) * page, (block.address + block.size) // page * page
                    self.reserved -= max(0, end - begin)
                    if self._ends.get(pool) is block:
                        del self._ends[pool]  # what comes later gets a segment of its own
                elif whole:
                    self.reserved -= block.size
                else:
                    kept.append(entry)
            self._free[pool] = kept

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free = self._free[pool]
        at = bisect.bisect_left(free, (size, -1), key=_size_of)
        if at < len(free) and free[at][1].grows and at + 1 < len(free):
            at += 1  # the end of a segment that can grow counts as all that it can grow to
        return free.pop(at)[1] if at < len(free) else None

    def _segment(self, pool: Pool, size: int) -> Block:
        large = LARGE_SEGMENT if size < LARGE_FROM else -(-size // ROUND_LARGE) * ROUND_LARGE
        length = SMALL_SEGMENT if pool.small else large
        self.reserved += length
        block = Block(pool, self._next_address, length)
        self._next_address += length + LARGE_SEGMENT  # segments never join
        return block

    def _grown(self, pool: Pool, size: int) -> Block:
        """The end of the pool's segment, made long enough."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        end = self._ends.get(pool)
        if end is None:
            end = Block(pool, self._next_address, 0, grows=True)
            self._next_address += LARGE_SEGMENT << 25  # so that pages begin at multiples of their size
        elif end.free:
            self._withdraw(end)
        else:
            block = Block(pool, end.address + end.size, 0, before=end, grows=True)
            end.after, end.grows, end = block, False, block
        length = -(-(size - end.size) // page) * page
        end.size += length
        self.reserved += length
        self._ends[pool] = end
        return end

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.pool, block.address + size, block.size - size, True, block, block.after, grows=block.grows
        )
        if rest.after is not None:
            rest.after.before = rest
        if rest.grows:
            self._ends[rest.pool] = rest
        block.size, block.after, block.grows = size, rest, False
        self._offer(rest)

    def _offer(self, block: Block) -> None:
        bisect.insort(self._free[block.pool], (block.key, block), key=_size_of)

    def _withdraw(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect.bisect_left(free, block.key, key=_size_of)]


def _size_of(entry: tuple[tuple[int, int], Block]) -> tuple[int, int]:
    return entry[0]


def _joined(first: Block, second: Block) -> Block:
    first.size += second.size
    first.after, first.grows, first.free = second.after, second.grows, True
    if second.after is not None:
        second.after.before = first
    return first
