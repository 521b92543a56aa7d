"""Staging: a rank's files on the disk, and what is read from them ahead of need.

Reads pass through `incoming` page-locked buffers, writes through `outgoing` ones. So reading, updating and writing
overlap.

A *transfer* brings chunks of one unit to the device, for an update or for a gather. Transfers have the same order in
every step, so the last step predicts the next one, and the disk reads while the device computes. When a prediction
turns out wrong, what was read for it is dropped and read again.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from shardwise.config.sections import Offload
from shardwise.memory.ledger import Ledger
from shardwise.offload.disk_file import DiskDemand, DiskFile, aligned
from shardwise.offload.pinned import Chunk, HostMemory, RequestDone, StagingBuffer, StagingBuffers
from shardwise.offload.streams import PAST, Event
from shardwise.partition.layout import Span

T = TypeVar("T")

_BUFFER_BLOCKS = 8
_BUFFERS, _LEAST_BUFFERS = 64, 4
_MOST_BYTES = 512 << 20
"""The size of all buffers of one direction."""


class AccessHistory(Generic[T]):
    """Items that recur in the same order in every step, numbered from the first, and the prediction of the next.

    >>> history = AccessHistory[str]()
    >>> history.enter("a"), history.enter("b"), history.begin_step()
    (False, False, False)
    >>> history.predict(), history.predict(), history.predict()
    ((2, 'a'), (3, 'b'), None)
    >>> history.enter("a"), history.predict()
    (True, (4, 'a'))
    """

    def __init__(self) -> None:
        self.entered = 0
        """The number of the next item."""
        self._previous: list[T] = []
        self._current: list[T] = []
        self._repeats = False  # whether the current step has equalled the previous one so far
        self._predicted = 0  # the number up to which items were predicted

    def enter(self, item: T) -> bool:
        """Record an item; returns whether it was predicted."""
        place = len(self._current)
        self._current.append(item)
        self._repeats = self._repeats and place < len(self._previous) and self._previous[place] == item
        was_predicted = self._repeats and self._predicted > self.entered
        self.entered += 1
        if not was_predicted:
            self.drop_predictions()
        return was_predicted

    def begin_step(self) -> bool:
        """Record that a new step begins. Returns whether the last two steps were the same."""
        repeated = self._repeats and len(self._current) == len(self._previous)
        self._previous, self._current = self._current, []
        self._repeats = bool(self._previous)
        if not repeated:
            self.drop_predictions()
        return repeated

    def predict(self) -> tuple[int, T] | None:
        """The next item after all that were predicted, with its number; at most one step ahead."""
        if not self._repeats or self._predicted - self.entered >= len(self._previous):
            return None
        number, self._predicted = self._predicted, self._predicted + 1
        place = number - self.entered + len(self._current)
        return number, self._previous[place % len(self._previous)]

    def drop_predictions(self) -> None:
        """Predict again from the next item on."""
        self._predicted = self.entered


class DiskTransfer(Protocol):
    """One unit's transfer from the disk to the device."""

    @property
    def states(self) -> object:
        """The unit's states: transfers of the same unit have the same."""

    def chunks(self) -> Iterator[Chunk]:
        """The chunks that it will fetch, in this order."""


@dataclass
class PendingRead:
    """A chunk that is being read."""

    chunk: Chunk
    buffer: StagingBuffer
    done: Future[None]


class ReadAhead:
    """Reads into `buffers` the chunks that are fetched next."""

    def __init__(self, buffers: StagingBuffers) -> None:
        self._buffers = buffers
        self._history = AccessHistory[DiskTransfer]()
        self._pending: deque[PendingRead] = deque()
        self._planned: Iterator[Chunk] = iter(())  # what to read after the pending chunks
        self._planned_states: object = None
        self._planned_number = -1  # the number of the transfer that the planned chunks are for
        self._next: Chunk | None = None
        self._transferring: object = None  # the states of the transfer that runs
        self._predicts = True

    def begin(self, transfer: DiskTransfer) -> None:
        """Begin a transfer, which then fetches its chunks."""
        if not self._history.enter(transfer):
            self._plan(transfer.chunks())
        self._transferring, self._predicts = transfer.states, True
        self._fill()

    def end(self) -> None:
        """End the transfer: it has fetched all its chunks, and issued the writes of those that it changed."""
        self._transferring = None
        self._fill()

    def begin_step(self) -> None:
        """Begin a step. If the last one differed from the one before it, what was read ahead is dropped."""
        if not self._history.begin_step():
            self.drop()

    def fetch(self, chunk: Chunk) -> StagingBuffer:
        """The buffer with a chunk's bytes. Blocks until they are read; the caller gives the buffer back."""
        if not self._pending or self._pending[0].chunk is not chunk:
            self.drop()
            self._start(chunk, self._buffers.take())
        reading = self._pending.popleft()
        chunk.is_being_read = False
        self._fill()
        try:
            reading.done.result()
        except BaseException:
            self._buffers.give(reading.buffer, RequestDone(reading.done))
            chunk.file.check()  # a write that failed earlier is the reason, if there was one
            raise
        return reading.buffer

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, StagingBuffer]]:
        """Written chunks in turn. A buffer belongs to the caller until the next one is asked for."""
        wanted = list(chunks)
        self._plan(iter(wanted))
        # A caller that reads one state often reads another next, which would drop what was read for the next transfer:
        # test_disk.test_a_read_of_states_reads_just_those.
        self._predicts = False
        try:
            for chunk in wanted:
                buffer = self.fetch(chunk)
                yield chunk, buffer
                self._buffers.give(buffer, PAST)
        finally:
            self._predicts = True

    def drop(self) -> None:
        """Drop what was read ahead: values may change where they rest, or the order is another one."""
        while self._pending:
            reading = self._pending.popleft()
            reading.chunk.is_being_read = False
            self._buffers.give(reading.buffer, RequestDone(reading.done))
        self._planned, self._next = iter(()), None
        self._history.drop_predictions()

    def _plan(self, chunks: Iterator[Chunk]) -> None:
        """Read just these chunks next."""
        self.drop()
        self._planned, self._planned_number = chunks, self._history.entered - 1

    def _fill(self) -> None:
        """Start reads while there are free buffers and the next chunk is known."""
        while (chunk := self._upcoming()) is not None and (buffer := self._buffers.try_take()) is not None:
            self._next = None
            self._start(chunk, buffer)

    def _upcoming(self) -> Chunk | None:
        """The chunk to read next. None if it is not known, or if its next write is not issued yet."""
        while self._next is None or not self._next.is_written:
            self._next = next(self._planned, None)
            if self._next is None:
                predicted = self._history.predict() if self._predicts else None
                if predicted is None:
                    return None
                self._planned_number, transfer = predicted
                self._planned, self._planned_states = transfer.chunks(), transfer.states
        # Requests to one extent run in the order in which they are issued (see `disk_file`), so a read must be issued
        # after the write whose values it is for. That write is still to come if an earlier transfer of the unit has
        # not fetched the chunk yet, or runs now: it issues its writes before it ends.
        # test_disk.test_nothing_is_read_ahead_that_has_still_to_be_written
        is_for_later = self._planned_number >= self._history.entered
        awaits_write = self._next.is_being_read or self._planned_states is self._transferring
        return None if is_for_later and awaits_write else self._next

    def _start(self, chunk: Chunk, buffer: StagingBuffer) -> None:
        chunk.is_being_read = True
        self._pending.append(PendingRead(chunk, buffer, chunk.file.read(chunk.extent, buffer.bytes(chunk))))


class Staging:
    """The files and buffers of an engine that keeps something on the disk."""

    def __init__(
        self, ledger: Ledger, settings: Offload, host: HostMemory, largest_bytes: int, disk_bytes: int
    ) -> None:
        """`largest_bytes` is the largest bucket of one state, `disk_bytes` what rests on the disk in all."""
        self._settings = settings
        self._files: dict[str, DiskFile] = {}
        block = self._file(_folder(settings)).block_bytes
        most_bytes = max(block, min(_BUFFER_BLOCKS * block, _MOST_BYTES // _BUFFER_BLOCKS))
        self.chunk_bytes = min(most_bytes, aligned(largest_bytes))
        most = max(_LEAST_BUFFERS, min(_BUFFERS, _MOST_BYTES // most_bytes, disk_bytes // self.chunk_bytes))
        self.incoming = StagingBuffers(ledger, self.chunk_bytes, most, host)
        self.outgoing = StagingBuffers(ledger, self.chunk_bytes, most, host)
        self._reads = ReadAhead(self.incoming)

    @property
    def most_bytes(self) -> int:
        """The size of all buffers that may be allocated."""
        return self.incoming.most_bytes + self.outgoing.most_bytes

    def file(self, is_weights: bool) -> DiskFile:
        """The file for weights, or for the optimizer's states."""
        own = self._settings.weights_nvme_path if is_weights else None
        return self._file(own or _folder(self._settings))

    def allocate(self, spans: Iterable[Span], dtype: torch.dtype, is_weights: bool) -> list[Chunk]:
        """Chunks for a state whose buckets are `spans`. None crosses the border of a bucket."""
        file, most = self.file(is_weights), self.chunk_bytes // dtype.itemsize
        cuts = [cut for span in spans for cut in span.split(most)]
        return [Chunk(cut, file, file.allocate(cut.numel * dtype.itemsize)) for cut in cuts]

    def demands(self, weights_bytes: int, optim_bytes: int) -> list[DiskDemand]:
        """What the files need on each disk, and what is free there now."""
        found = []
        for file, size_bytes in self._needed(weights_bytes, optim_bytes).items():
            number, free_bytes = file.room()
            disk = (socket.gethostname(), number)
            found.append(DiskDemand(disk, str(file.folder), size_bytes - file.size_bytes, free_bytes))
        return found

    def reserve(self, weights_bytes: int, optim_bytes: int) -> None:
        """Reserve the disk space for everything, before anything is written."""
        for file, size_bytes in self._needed(weights_bytes, optim_bytes).items():
            file.reserve(size_bytes)

    def _needed(self, weights_bytes: int, optim_bytes: int) -> Counter[DiskFile]:
        needed: Counter[DiskFile] = Counter()
        for is_weights, size_bytes in ((True, weights_bytes), (False, optim_bytes)):
            if size_bytes:
                needed[self.file(is_weights)] += size_bytes
        return needed

    def begin_step(self) -> None:
        """Begin a step's transfers."""
        self.check()
        self._reads.begin_step()

    def begin(self, transfer: DiskTransfer) -> None:
        """Begin a transfer, which then fetches its chunks."""
        self.check()
        self._reads.begin(transfer)

    def end(self) -> None:
        """End the transfer: it has fetched and sent all its chunks."""
        self._reads.end()

    def fetch(self, chunk: Chunk) -> StagingBuffer:
        """The buffer with a chunk's bytes. Blocks until they are read; the caller gives it back to `incoming`."""
        return self._reads.fetch(chunk)

    def read(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, StagingBuffer]]:
        """Written chunks in turn. A buffer belongs to the caller until the next one is asked for."""
        return self._reads.read(chunks)

    def send(self, chunk: Chunk, buffer: StagingBuffer, copied: Event) -> None:
        """Write a buffer of `outgoing`, which holds a chunk once `copied` has happened. The buffer is given back."""
        written = chunk.file.write(chunk.extent, buffer.bytes(chunk), copied.synchronize)
        self.outgoing.give(buffer, RequestDone(written))

    def drop(self) -> None:
        """Drop what was read ahead, because values may change where they rest."""
        self._reads.drop()

    def check(self) -> None:
        """Raise the first error that a write met."""
        for file in self._files.values():
            file.check()

    def wait(self, chunks: Iterable[Chunk]) -> None:
        """Block the host until the last request to each of `chunks` has ended."""
        for chunk in chunks:
            if chunk.extent.last is not None:
                chunk.extent.last.exception()
        self.check()

    def close(self) -> None:
        """Finish pending requests, free the buffers and close the files."""
        self._reads.drop()
        self.incoming.close()
        self.outgoing.close()
        for file in self._files.values():
            file.close()

    def _file(self, folder: str) -> DiskFile:
        if folder not in self._files:
            self._files[folder] = DiskFile(Path(folder), self._settings)
        return self._files[folder]


def staging_bytes(disk_bytes: int) -> int:
    """An upper bound of the host memory that buffers take for `disk_bytes` on the disk, unless these are very few."""
    return min(2 * _MOST_BYTES, 2 * disk_bytes)


def _folder(settings: Offload) -> str:
    folder = settings.nvme_path or settings.weights_nvme_path
    assert folder is not None, "the configuration names a folder for what rests on the disk"
    return folder
