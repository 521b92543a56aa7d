"""Weights that rest in safetensors files and are only read: direct I/O by several threads, ahead of need.

Names, used throughout:
- *block*: what one request reads, on 4096-byte boundaries of the file: some tensors of a unit that are neighbours in
  the file, or a part of a large one. A block knows which of its bytes belong where in the unit.
- *follower*: the unit that was fetched after another one the last time. Passes repeat, so the blocks of the followers
  are read while those of the units before them are copied to the device and used.

The files are those that the user gave: nothing is copied, and nothing is written. They stay open, so one that is
replaced (by renaming another to its name, or deleted) is read to the end as it was. One that is written to, or cut
short, is noticed by its time and size after each read of it, before the values that were read are used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch

from shardwise.errors import ConfigError, DiskError
from shardwise.memory.ledger import Entry, Ledger
from shardwise.offload.disk_file import ALIGN_BYTES, aligned
from shardwise.offload.pinned import HostMemory, RequestDone, StagingBuffer, StagingBuffers
from shardwise.offload.safetensors_header import read_header
from shardwise.offload.storage import Origin, Parts
from shardwise.offload.streams import Streams
from shardwise.partition.layout import Span
from shardwise.tensors import blank, dtype_name

BLOCK_BYTES = 8 << 20
_BUFFERS = 64
_THREADS = 8
_GAP_BYTES = 64 << 10
"""Tensors that are so near to each other are read together, with what lies between them."""
_LOG = logging.getLogger("shardwise")


class FileTensor(Protocol):
    """A tensor in a file."""

    @property
    def file(self) -> str: ...

    @property
    def name(self) -> str: ...


class FileOrigin(Protocol):
    """An origin of values (see `storage.Origin`) that is one tensor in a file, or several one after the other."""

    def located(self, part: Span) -> Iterator[tuple[FileTensor, Span]]: ...


class FilePlace(NamedTuple):
    """Bytes of a file, and the byte of a unit's storage that the first of them is."""

    file: int
    start: int
    stop: int
    target: int


class BlockCopy(NamedTuple):
    """Bytes of a block's buffer, and where they go in the unit's storage."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class FileBlock:
    """One request to a file. `needed_bytes` are those that the file must have from `offset` on; it may end there."""

    file: int
    offset: int
    size_bytes: int
    needed_bytes: int
    copies: tuple[BlockCopy, ...]


class OpenFiles:
    """Files that are open for reading, until `close` or the last reference: a read under way has one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._handles: list[int] = []
        self.close = weakref.finalize(self, _close_all, self._handles)
        for path in paths:
            self._handles.append(_open(path))
        self._versions = [_version(handle) for handle in self._handles]

    def read(self, block: FileBlock, room: memoryview) -> None:
        """Read a block. A DiskError if its file has changed since it was opened."""
        path, handle, done = self._paths[block.file], self._handles[block.file], 0
        while done < block.needed_bytes:
            try:
                count = os.preadv(handle, [room[done:]], block.offset + done)
            except OSError as error:
                raise DiskError(
                    error.errno,
                    f"{path}: {block.size_bytes} bytes at {block.offset} could not be read ({error.strerror}): check "
                    "the disk, or copy the file again",
                ) from error
            if not count:
                break
            done += count
        if done < block.needed_bytes or _version(handle) != self._versions[block.file]:
            raise DiskError(
                errno.ESTALE,
                f"{path} was overwritten or cut short while the model was streamed from it: restore the file, and "
                "call shardwise.stream again",
            )


class WeightFiles:
    """The files of one model, and the buffers that their blocks pass through."""

    def __init__(self, paths: list[str], largest_bytes: int, ledger: Ledger, host: HostMemory) -> None:
        """`largest_bytes` is the largest part of a unit that this rank reads."""
        self.paths = [Path(path) for path in dict.fromkeys(paths)]
        self._headers = [read_header(path) for path in self.paths]
        self._numbers = {str(path): number for number, path in enumerate(self.paths)}
        self._files = OpenFiles(self.paths)
        self.block_bytes = min(BLOCK_BYTES, aligned(largest_bytes))
        self._buffers = StagingBuffers(ledger, self.block_bytes + ALIGN_BYTES, _BUFFERS, host)
        self._workers = ThreadPoolExecutor(_THREADS, "shardwise-weights")
        self._followers: dict[FileStorage, FileStorage] = {}
        self._last: FileStorage | None = None
        self._planned: FileStorage | None = None
        self._blocks: Iterator[FileBlock] = iter(())
        self._next: FileBlock | None = None
        self._pending: deque[tuple[FileBlock, StagingBuffer, Future[None]]] = deque()

    def check(self, origin: FileTensor, dtype: torch.dtype) -> None:
        """Raise a ConfigError if a tensor has another dtype than the one to compute in."""
        found = self._headers[self._numbers[origin.file]][origin.name]
        if not found.is_of(dtype):
            raise ConfigError(
                f"{origin.name!r} is {found.dtype} in {origin.file}, and is to compute as {dtype_name(dtype)}: "
                "from the disk, weights compute in the dtype that they are stored in: leave precision out, or take "
                "weights='host', or save the model in that dtype first"
            )

    def place(self, origin: FileTensor, part: Span, itemsize: int, target: int) -> FilePlace:
        """Where elements `part` of a tensor are."""
        number = self._numbers[origin.file]
        start = self._headers[number][origin.name].start
        return FilePlace(number, start + part.start * itemsize, start + part.stop * itemsize, target)

    def fetch(self, storage: FileStorage) -> Iterator[tuple[FileBlock, StagingBuffer]]:
        """The blocks of a storage in turn, read. The caller gives each buffer back."""
        if self._last is not None:
            self._followers[self._last] = storage
        self._last = storage
        for block in storage.blocks:
            if not self._pending or self._pending[0][0] is not block:
                self._restart(storage, block)
            self._fill()
            if not self._pending:  # every buffer is still being copied from
                self._start(self._next_block(), self._buffers.take())
            _, buffer, done = self._pending.popleft()
            try:
                done.result()
            except BaseException:
                self._buffers.give(buffer, RequestDone(done))
                raise
            yield block, buffer

    def give(self, buffer: StagingBuffer, streams: Streams) -> None:
        """Give a buffer back, from which the h2d stream copies."""
        self._buffers.give(buffer, streams.h2d.mark())
        self._fill()

    def read(self, block: FileBlock) -> memoryview:
        """A block's bytes, now, outside of any pass."""
        room = memoryview(mmap.mmap(-1, block.size_bytes))
        self._files.read(block, room)
        return room

    def close(self) -> None:
        """Finish pending reads, free the buffers, and close the files."""
        self._drop()
        self._buffers.close()
        self._workers.shutdown()
        self._files.close()

    def _restart(self, storage: FileStorage, block: FileBlock) -> None:
        """Read from `block` on: the next use was not predicted."""
        self._drop()
        rest = iter(storage.blocks)
        for found in rest:
            if found is block:
                break
        self._planned, self._blocks, self._next = storage, rest, block

    def _drop(self) -> None:
        while self._pending:
            _, buffer, done = self._pending.popleft()
            self._buffers.give(buffer, RequestDone(done))
        self._planned, self._blocks, self._next = None, iter(()), None

    def _fill(self) -> None:
        """Start reads while there are free buffers and the next block is known."""
        while self._upcoming() is not None and (buffer := self._buffers.try_take()) is not None:
            self._start(self._next_block(), buffer)

    def _upcoming(self) -> FileBlock | None:
        """The block to read next, of the storage that is planned or of its follower."""
        if self._next is None:
            self._next = next(self._blocks, None)
        if self._next is None and self._planned is not None:
            follower = self._followers.get(self._planned)
            # Not around to what is fetched now: its blocks are in the queue once.
            if follower is not None and follower is not self._last:
                self._planned, self._blocks = follower, iter(follower.blocks)
                self._next = next(self._blocks, None)
        return self._next

    def _next_block(self) -> FileBlock:
        block, self._next = self._next, None
        assert block is not None
        return block

    def _start(self, block: FileBlock, buffer: StagingBuffer) -> None:
        room = buffer.view[: block.size_bytes]
        self._pending.append((block, buffer, self._workers.submit(self._files.read, block, room)))


class FileStorage:
    """The weights of a unit in files. They are only read."""

    travels_directly = True

    def __init__(self, files: WeightFiles, ledger: Ledger, entry: Entry, numel: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.size_bytes = numel * dtype.itemsize
        self._files, self._ledger, self._entry = files, ledger, entry
        self._places: list[FilePlace] = []
        self._blocks: list[FileBlock] | None = None
        ledger.add(entry, self.size_bytes)

    @property
    def blocks(self) -> list[FileBlock]:
        """What is read, in the order of the files."""
        if self._blocks is None:
            self._blocks = list(blocks_of(self._places, self._files.block_bytes))
        return self._blocks

    def load(self, span: Span, origin: Origin, part: Span) -> None:
        itemsize, target = self.dtype.itemsize, span.start * self.dtype.itemsize
        for tensor, inside in cast(FileOrigin, origin).located(part):
            self._files.check(tensor, self.dtype)
            self._places.append(self._files.place(tensor, inside, itemsize, target))
            target += (inside.stop - inside.start) * itemsize
        self._blocks = None

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        return blank(self.dtype).expand(shape)

    def read(self, span: Span) -> torch.Tensor:
        values = torch.zeros(self.size_bytes, dtype=torch.uint8)
        for block in self.blocks:
            room = torch.frombuffer(self._files.read(block), dtype=torch.uint8)
            for source, target, size in block.copies:
                values[target : target + size] = room[source : source + size]
        return values.view(self.dtype)[span.slice]

    def write(self, span: Span, values: torch.Tensor) -> None:
        raise RuntimeError(
            "weights that are streamed from files are only read: load the model with weights='host' to change them"
        )

    def to_device(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        flat = target.view(torch.uint8)
        for block, buffer in self._files.fetch(self):
            for source, to, size in block.copies:
                streams.copy_to_device(flat[to : to + size], buffer.tensor[source : source + size])
            streams.moved_bytes["disk to host"] += block.needed_bytes
            # A thread reads the next block into this buffer: not before the copy has ended.
            self._files.give(buffer, streams)

    def from_device(self, streams: Streams, span: Span, parts: Parts) -> None:
        self.write(span, parts[0][1])

    def wait(self) -> None:
        """Nothing to wait for: nothing is written."""

    def free(self) -> None:
        self._ledger.remove(self._entry, self.size_bytes)
        self.size_bytes = 0
        self._places, self._blocks = [], []


def blocks_of(places: list[FilePlace], block_bytes: int) -> Iterator[FileBlock]:
    """The requests for some places: neighbours together, in the order of the files, cut on page boundaries.

    >>> blocks = list(blocks_of([FilePlace(0, 100, 5000, 0)], block_bytes=4096))
    >>> [(block.offset, block.needed_bytes) for block in blocks]
    [(0, 4096), (4096, 904)]
    >>> blocks[1].copies
    (BlockCopy(source=0, target=3996, size_bytes=904),)
    """
    run: list[FilePlace] = []
    for place in sorted(place for place in places if place.stop > place.start):
        if run and (place.file != run[-1].file or place.start - run[-1].stop > _GAP_BYTES):
            yield from _cut(run, block_bytes)
            run = []
        run.append(place)
    if run:
        yield from _cut(run, block_bytes)


def _cut(run: list[FilePlace], block_bytes: int) -> Iterator[FileBlock]:
    """Blocks of at most `block_bytes` for neighbouring places of one file."""
    begin = run[0].start // ALIGN_BYTES * ALIGN_BYTES
    end = max(place.stop for place in run)
    first = 0
    for offset in range(begin, end, block_bytes):
        stop = min(offset + block_bytes, end)
        copies = []
        for place in run[first:]:
            if place.start >= stop:
                break
            low, high = max(place.start, offset), min(place.stop, stop)
            if low < high:
                copies.append(BlockCopy(low - offset, place.target + low - place.start, high - low))
        while first < len(run) and run[first].stop <= stop:
            first += 1
        if copies:
            yield FileBlock(run[0].file, offset, aligned(stop - offset), stop - offset, tuple(copies))


def _open(path: Path) -> int:
    """A handle that bypasses the page cache, if the file system can."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    with contextlib.suppress(OSError):
        handle = os.open(path, flags)
        with contextlib.closing(mmap.mmap(-1, ALIGN_BYTES)) as page:
            try:
                os.preadv(handle, [page], 0)
                return handle
            except OSError:
                os.close(handle)
    _LOG.warning("%s: this file system does not support direct I/O (O_DIRECT), so the page cache is used", path.parent)
    return os.open(path, os.O_RDONLY)


def _version(handle: int) -> tuple[int, int]:
    """What a write to an open file changes: its size and its time."""
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns


def _close_all(handles: list[int]) -> None:
    while handles:
        os.close(handles.pop())
