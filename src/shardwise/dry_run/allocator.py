"""What torch's CUDA allocator reserves for a sequence of allocations: more than the tensors take.

The allocator keeps freed memory and serves later requests from it, the smallest free block that is large enough first.
What is left of a block may be of no use to the requests that follow. `shardwise` trains with expandable segments: each
pool is one range of addresses, which grows by pages at its end; `torch.cuda.empty_cache()` gives back the pages that
are wholly free.

    pool    requests of at most 1 MiB, and larger ones, apart; pages of 2 and of 20 MiB
    block   a run of addresses: allocated, free (mapped), or unmapped

One stream allocates everything (see `offload.streams`), so that is all there is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum

MIB = 1 << 20
_ROUND_BYTES = 512
_SMALL_BYTES = MIB
_ADDRESSES = 1 << 50


class _Is(Enum):
    ALLOCATED = "allocated"
    FREE = "free"
    UNMAPPED = "unmapped"


class _Block:
    """A run of addresses, and its neighbours in their pool."""

    __slots__ = ("before", "behind", "size", "start", "state")

    def __init__(self, start: int, size: int, state: _Is) -> None:
        self.start, self.size, self.state = start, size, state
        self.before: _Block | None = None
        self.behind: _Block | None = None


class CachingAllocator:
    """What a device has reserved, by the allocations on it; each has a key.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate(1, 30 * MIB)
    >>> allocator.allocate(2, 5 * MIB)
    >>> allocator.free(1)
    >>> allocator.allocate(3, 40 * MIB)
    >>> allocator.reserved_bytes // MIB
    80
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._small, self._large = _Pool(2 * MIB), _Pool(20 * MIB)
        self._live: dict[int, tuple[_Pool, _Block]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the mapped pages."""
        return self._small.mapped_bytes + self._large.mapped_bytes

    def allocate(self, key: int, size_bytes: int) -> None:
        size = -(-size_bytes // _ROUND_BYTES) * _ROUND_BYTES
        pool = self._small if size <= _SMALL_BYTES else self._large
        self._live[key] = pool, pool.allocate(size)
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)

    def free(self, key: int) -> None:
        pool, block = self._live.pop(key)
        pool.free(block)

    def empty_cache(self) -> None:
        """Give back the pages that are wholly free."""
        self._small.empty_cache()
        self._large.empty_cache()

    def reset_peak(self) -> None:
        """Restart the peak from what is reserved now."""
        self.peak_bytes = self.reserved_bytes


class _Pool:
    """One range of addresses."""

    def __init__(self, page_bytes: int) -> None:
        self._page = page_bytes
        self.mapped_bytes = 0
        end = _Block(0, _ADDRESSES, _Is.UNMAPPED)
        self._unmapped: dict[int, _Block] = {0: end}
        self._free: list[tuple[int, int]] = []  # (size, start), sorted
        self._free_at: dict[int, _Block] = {}

    def allocate(self, size: int) -> _Block:
        """Take `size` bytes of the block that fits best, after mapping more pages if none does."""
        block = self._fit(size) or self._grow(size)
        self._leave(block)
        block.state = _Is.ALLOCATED
        if block.size > size:
            self._enter(self._split(block, size, _Is.FREE))
        return block

    def free(self, block: _Block) -> None:
        """End an allocation; what lies free on both sides becomes one block."""
        block.state = _Is.FREE
        self._enter(self._merged(block))

    def empty_cache(self) -> None:
        for block in list(self._free_at.values()):
            start = -(-block.start // self._page) * self._page
            end = (block.start + block.size) // self._page * self._page
            if end <= start:
                continue
            self._leave(block)
            self.mapped_bytes -= end - start
            if block.start < start:
                before, block = block, self._split(block, start - block.start, _Is.UNMAPPED)
                self._enter(before)
            if block.size > end - start:
                self._enter(self._split(block, end - start, _Is.FREE))
            block.state = _Is.UNMAPPED
            self._enter(self._merged(block))

    def _fit(self, size: int) -> _Block | None:
        """The smallest free block with room. One before unmapped addresses counts with these: it is taken last."""
        index = bisect_left(self._free, (size, -1))
        if index == len(self._free):
            return None
        block = self._free_at[self._free[index][1]]
        for _, start in self._free[index + 1 :]:
            if _reach(other := self._free_at[start]) >= _reach(block):
                break
            block = other
        return block

    def _grow(self, size: int) -> _Block:
        """Map pages at the lowest addresses where `size` bytes in a row are free or unmapped."""
        for start in sorted(self._unmapped):
            first = self._unmapped[start]
            if first.before is not None and first.before.state is _Is.FREE:
                first = first.before
            run: list[tuple[_Block, int]] = []
            found = 0
            for block in _from(first):
                if found >= size or block.state is _Is.ALLOCATED:
                    break
                run.append((block, min(block.size, size - found)))
                found += block.size
            if found >= size:
                break
        for block, part in run:
            if block.state is _Is.UNMAPPED:
                grown = self._map(block, -(-part // self._page) * self._page)
        return grown

    def _map(self, block: _Block, size: int) -> _Block:
        self._leave(block)
        if block.size > size:
            self._enter(self._split(block, size, _Is.UNMAPPED))
        self.mapped_bytes += size
        block.state = _Is.FREE
        block = self._merged(block)
        self._enter(block)
        return block

    def _enter(self, block: _Block) -> None:
        if block.state is _Is.UNMAPPED:
            self._unmapped[block.start] = block
        else:
            insort(self._free, (block.size, block.start))
            self._free_at[block.start] = block

    def _leave(self, block: _Block) -> None:
        if block.state is _Is.UNMAPPED:
            del self._unmapped[block.start]
        else:
            del self._free[bisect_left(self._free, (block.size, block.start))]
            del self._free_at[block.start]

    def _split(self, block: _Block, size: int, state: _Is) -> _Block:
        """Cut a block behind `size` bytes; returns the second part."""
        rest = _Block(block.start + size, block.size - size, state)
        rest.before, rest.behind, block.behind, block.size = block, block.behind, rest, size
        if rest.behind is not None:
            rest.behind.before = rest
        return rest

    def _merged(self, block: _Block) -> _Block:
        """A block together with neighbours in the same state."""
        before, behind = block.before, block.behind
        if behind is not None and behind.state is block.state:
            self._leave(behind)
            _join(block, behind)
        if before is not None and before.state is block.state:
            self._leave(before)
            return _join(before, block)
        return block


def _join(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.behind = second.behind
    if first.behind is not None:
        first.behind.before = first
    return first


def _reach(block: _Block) -> int:
    behind = block.behind
    return block.size + (behind.size if behind is not None and behind.state is _Is.UNMAPPED else 0)


def _from(block: _Block | None) -> Iterator[_Block]:
    while block is not None:
        yield block
        block = block.behind
