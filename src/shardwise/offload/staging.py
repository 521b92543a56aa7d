"""Staging: the page-locked buffers between the disk and the device, and what is read ahead into them.

A *chunk* is what one buffer carries: some elements of a field, in an extent of the file. It is read when it is asked
for, or ahead of that: deliveries come in the same order in every step, so those of the last one tell what to read next
(see `routine`). The disk is thus busy while other things are computed, and reads, updates and writes overlap.

A buffer is used again when its chunk has been copied to the device, or written to the disk. There is a fixed number of
them, whatever the model. Nothing is read ahead that an update before it has still to write.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwise.config.presets import NVME_FOLDER
from shardwise.config.sections import Offload
from shardwise.memory.ledger import Entry, Kind, Ledger, Tier
from shardwise.offload.disk_file import DiskFile, Extent, aligned
from shardwise.offload.pinned import page_aligned
from shardwise.offload.read_ahead import AccessHistory
from shardwise.offload.streams import PAST, Event
from shardwise.partition.layout import Span

_BUFFER_BLOCKS = 8
_BUFFERS, _LEAST_BUFFERS = 64, 4
_MOST_BYTES = 512 << 20
"""Of the buffers in one direction."""
_ENTRY = Entry(Kind.WORK, "staging", Tier.HOST)


class Chunk:
    """Elements `span` of a field, and where in which file they rest."""

    __slots__ = ("extent", "file", "is_coming", "span")

    def __init__(self, span: Span, file: DiskFile, extent: Extent) -> None:
        self.span = span
        self.file = file
        self.extent = extent
        self.is_coming = False

    @property
    def is_written(self) -> bool:
        return self.extent.checksums is not None


class DiskReads(Protocol):
    """A unit's way to the device."""

    @property
    def states(self) -> object: ...

    def chunks(self) -> Iterator[Chunk]:
        """What it will ask for, in this order."""


class StagingBuffer:
    """One buffer: its bytes for torch, and for the disk."""

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.tensor = page_aligned(size_bytes, pinned)
        self.view = memoryview(self.tensor.numpy())  # type: ignore[arg-type]  # numpy has the protocol, its stubs not
        self.is_free: Callable[[], bool] = lambda: True
        self.wait: Callable[[], object] = lambda: None

    def values(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The chunk's elements."""
        return self.tensor[: chunk.span.numel * dtype.itemsize].view(dtype)

    def bytes(self, chunk: Chunk) -> memoryview:
        """All of its extent."""
        return self.view[: chunk.extent.size_bytes]


class StagingBuffers:
    """At most `most` buffers, made when they are first needed and used again in the order they were given back."""

    def __init__(self, ledger: Ledger, size_bytes: int, most: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._most, self._count, self._pinned = most, 0, pinned
        self._ledger = ledger
        self._idle: deque[StagingBuffer] = deque()

    @property
    def most_bytes(self) -> int:
        """What they take when all are there."""
        return self._most * self.size_bytes

    def take(self, at_once: bool = False) -> StagingBuffer | None:
        """A buffer; None if that would mean to wait and it should be `at_once`."""
        if self._idle and (self._idle[0].is_free() or self._count == self._most):
            if at_once and not self._idle[0].is_free():
                return None
            buffer = self._idle.popleft()
            buffer.wait()
            return buffer
        if self._count == self._most:
            return None
        self._count += 1
        self._ledger.add(_ENTRY, self.size_bytes)
        return StagingBuffer(self.size_bytes, self._pinned)

    def need(self) -> StagingBuffer:
        """A buffer, waited for if need be."""
        buffer = self.take()
        assert buffer is not None, "all buffers are in use"
        return buffer

    def give_after_copy(self, buffer: StagingBuffer, event: Event) -> None:
        buffer.is_free, buffer.wait = event.query, event.synchronize
        self._idle.append(buffer)

    def give_after_write(self, buffer: StagingBuffer, written: Future[None]) -> None:
        # Not `result`: whoever gets the buffer next is not who should hear of a failure.
        buffer.is_free, buffer.wait = written.done, written.exception
        self._idle.append(buffer)

    def close(self) -> None:
        """Give the memory back, when nothing uses it any more."""
        for buffer in self._idle:
            buffer.wait()
        self._ledger.remove(_ENTRY, len(self._idle) * self.size_bytes)
        self._count -= len(self._idle)
        self._idle.clear()


@dataclass
class PendingRead:
    """A chunk on its way."""

    chunk: Chunk
    buffer: StagingBuffer
    done: Future[None]


class Staging:
    """The files and buffers of an engine of which something rests on the disk."""

    def __init__(
        self, ledger: Ledger, settings: Offload, rank: int, pinned: bool, largest_bytes: int, disk_bytes: int
    ) -> None:
        """`largest_bytes` is the most of a field that travels at once, `disk_bytes` what rests on the disk in all."""
        self._settings, self._rank = settings, rank
        self._files: dict[str, DiskFile] = {}
        block = self._file(_folder(settings)).block_bytes
        most_bytes = max(block, min(_BUFFER_BLOCKS * block, _MOST_BYTES // _BUFFER_BLOCKS))
        self.chunk_bytes = min(most_bytes, aligned(largest_bytes))
        most = max(_LEAST_BUFFERS, min(_BUFFERS, _MOST_BYTES // most_bytes, disk_bytes // self.chunk_bytes))
        self.incoming = StagingBuffers(ledger, self.chunk_bytes, most, pinned)
        self.outgoing = StagingBuffers(ledger, self.chunk_bytes, most, pinned)
        self._history = AccessHistory[DiskReads]()
        self._coming: deque[PendingRead] = deque()
        self._planned: Iterator[Chunk] = iter(())
        self._planned_for: object = None
        self._planned_number = -1
        self._next: Chunk | None = None
        self._delivering: object = None
        self._is_looking = False

    @property
    def most_bytes(self) -> int:
        """What the buffers take when all are there."""
        return self.incoming.most_bytes + self.outgoing.most_bytes

    def file(self, is_weights: bool) -> DiskFile:
        """The file that weights, or else the optimizer's states, rest in."""
        own = self._settings.weights_nvme_path if is_weights else None
        return self._file(own or _folder(self._settings))

    def allocate(self, spans: Iterable[Span], dtype: torch.dtype, is_weights: bool) -> list[Chunk]:
        """Room for a field whose buckets are `spans`: chunks that end where they do."""
        file, most = self.file(is_weights), self.chunk_bytes // dtype.itemsize
        cuts = [
            Span(start, min(start + most, span.stop)) for span in spans for start in range(span.start, span.stop, most)
        ]
        return [Chunk(cut, file, file.allocate(cut.numel * dtype.itemsize)) for cut in cuts]

    def reserve(self, weights_bytes: int, optim_bytes: int) -> None:
        """Have the disk set aside what will be needed, before anything is written."""
        needed: Counter[DiskFile] = Counter()
        for is_weights, size_bytes in ((True, weights_bytes), (False, optim_bytes)):
            if size_bytes:
                needed[self.file(is_weights)] += size_bytes
        for file, size_bytes in needed.items():
            file.reserve(size_bytes)

    def begin(self, delivery: DiskReads) -> None:
        """A delivery begins, which will fetch its chunks."""
        self.check()
        if not self._history.enter(delivery):
            self._plan(delivery.chunks(), self._history.entered - 1)
        self._delivering, self._is_looking = delivery.states, False
        self._read_ahead()

    def end(self) -> None:
        """It has fetched and sent all its chunks."""
        self._delivering = None
        self._read_ahead()

    def turn(self) -> None:
        """A step begins."""
        self.check()
        if not self._history.turn():
            self.drop()

    def fetch(self, chunk: Chunk) -> StagingBuffer:
        """The buffer with a chunk's bytes; the host waits for them. It is given back to `incoming`."""
        if not self._coming or self._coming[0].chunk is not chunk:
            self.drop()
            self._start(chunk, self.incoming.need())
        reading = self._coming.popleft()
        chunk.is_coming = False
        self._read_ahead()
        try:
            reading.done.result()
        except BaseException:
            self.incoming.give_after_write(reading.buffer, reading.done)
            self.check()  # a write that failed is why
            raise
        return reading.buffer

    def look(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, StagingBuffer]]:
        """Chunks that are written, one after the other; each buffer is the caller's until the next."""
        wanted = list(chunks)
        self._plan(iter(wanted), self._history.entered - 1)
        self._is_looking = True
        try:
            for chunk in wanted:
                buffer = self.fetch(chunk)
                yield chunk, buffer
                self.incoming.give_after_copy(buffer, PAST)
        finally:
            self._is_looking = False

    def send(self, chunk: Chunk, buffer: StagingBuffer, copied: Event) -> None:
        """Write a buffer of `outgoing` that holds a chunk after `copied`."""
        written = chunk.file.write(chunk.extent, buffer.bytes(chunk), copied.synchronize)
        self.outgoing.give_after_write(buffer, written)

    def drop(self) -> None:
        """Let go of what was read ahead: values may change where they rest."""
        while self._coming:
            reading = self._coming.popleft()
            reading.chunk.is_coming = False
            self.incoming.give_after_write(reading.buffer, reading.done)
        self._planned, self._next = iter(()), None
        self._history.forget()

    def check(self) -> None:
        """Raise what a write met with."""
        for file in self._files.values():
            file.check()

    def wait(self, chunks: Iterable[Chunk]) -> None:
        """Have the host wait until chunks are where they rest."""
        for chunk in chunks:
            if chunk.extent.last is not None:
                chunk.extent.last.exception()
        self.check()

    def close(self) -> None:
        """Finish, and remove the files."""
        self.drop()
        self.incoming.close()
        self.outgoing.close()
        for file in self._files.values():
            file.close()

    def _plan(self, chunks: Iterator[Chunk], number: int) -> None:
        self.drop()
        self._planned, self._planned_number = chunks, number

    def _read_ahead(self) -> None:
        """Start to read what is asked for next, as far as there are buffers."""
        while (chunk := self._upcoming()) is not None and (buffer := self.incoming.take(at_once=True)) is not None:
            self._next = None
            self._start(chunk, buffer)

    def _upcoming(self) -> Chunk | None:
        """What to read next; None where it is not known, or has still to be written first."""
        while self._next is None or not self._next.is_written:
            self._next = next(self._planned, None)
            if self._next is None:
                # Who looks may look at the next thing at once, and what was read for the next delivery was in vain.
                if self._is_looking or (predicted := self._history.predict()) is None:
                    return None
                self._planned_number, delivery = predicted
                self._planned, self._planned_for = delivery.chunks(), delivery.states
        is_later = self._planned_number >= self._history.entered
        is_held_up = self._next.is_coming or self._planned_for is self._delivering
        return None if is_later and is_held_up else self._next

    def _start(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        chunk.is_coming = True
        self._coming.append(PendingRead(chunk, buffer, chunk.file.read(chunk.extent, buffer.bytes(chunk))))

    def _file(self, folder: str) -> DiskFile:
        if folder not in self._files:
            self._files[folder] = DiskFile(_made(folder), f"rank-{self._rank}", self._settings)
        return self._files[folder]


def staging_bytes(disk_bytes: int) -> int:
    """The most that buffers take on the host for so much on the disk, but for very little."""
    return min(2 * _MOST_BYTES, 2 * disk_bytes)


def _folder(settings: Offload) -> str:
    folder = settings.nvme_path or settings.weights_nvme_path
    assert folder is not None, "the configuration names a folder for what rests on the disk"
    return folder


def _made(folder: str) -> Path:
    """The folder; what a preset chose is made, what a user named must be there: it may not be mounted."""
    path = Path(folder)
    if folder == NVME_FOLDER:
        path.mkdir(exist_ok=True)
    return path
