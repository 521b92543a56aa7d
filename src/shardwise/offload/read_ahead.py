"""Reading from the disk ahead of need, in the order in which the last step read.

A *transfer* brings chunks of one unit to the device, for an update or for a gather. Transfers have the same order in
every step, so the last step predicts the next one, and the disk reads while the device computes. When a prediction
turns out wrong, what was read for it is dropped and read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shardwise.offload.staging_buffers import Chunk, RequestDone, StagingBuffer, StagingBuffers
from shardwise.offload.streams import PAST

T = TypeVar("T")


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
