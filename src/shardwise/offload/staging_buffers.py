"""The host buffers between the disk and the device, and the chunks that they carry.

A *chunk* is what one buffer carries: some elements of a state, in one extent of a file. The number of buffers is fixed,
whatever the size of the model. A buffer is used again when its `ready` event has happened: the copy to the device, or
the request to the disk, that uses its content has ended.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from shardwise.memory.ledger import Entry, Kind, Ledger, Tier
from shardwise.offload.disk_file import DiskFile, Extent
from shardwise.offload.pinned import HostMemory
from shardwise.offload.streams import PAST, Event
from shardwise.partition.layout import Span

_ENTRY = Entry(Kind.WORK, "staging", Tier.HOST)


class Chunk:
    """Elements `span` of a state, and the extent of the file that they rest in."""

    __slots__ = ("extent", "file", "is_being_read", "span")

    def __init__(self, span: Span, file: DiskFile, extent: Extent) -> None:
        self.span = span
        self.file = file
        self.extent = extent
        self.is_being_read = False

    @property
    def is_written(self) -> bool:
        return self.extent.checksums is not None


@dataclass(frozen=True)
class RequestDone:
    """The end of a request to the disk, as an `Event`."""

    request: Future[None]

    def query(self) -> bool:
        return self.request.done()

    def synchronize(self) -> None:
        # Not `result`: a failed request is reported by `DiskFile.check`, not to the next user of its buffer
        # (test_disk.test_a_buffer_whose_write_failed_is_used_again).
        self.request.exception()


class StagingBuffer:
    """One buffer, as a tensor for torch and as bytes for the disk. Free for its next use after `ready`."""

    def __init__(self, size_bytes: int, host: HostMemory) -> None:
        self.tensor = host.pages(size_bytes)
        self.view = memoryview(self.tensor.numpy())  # type: ignore[arg-type]  # numpy has the protocol, its stubs not
        self.ready: Event = PAST

    def values(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The elements of `chunk`."""
        return self.tensor[: chunk.span.numel * dtype.itemsize].view(dtype)

    def bytes(self, chunk: Chunk) -> memoryview:
        """The bytes of the whole extent of `chunk`."""
        return self.view[: chunk.extent.size_bytes]


class StagingBuffers:
    """At most `most` buffers, allocated at their first use and used again in the order in which they were given."""

    def __init__(self, ledger: Ledger, size_bytes: int, most: int, host: HostMemory) -> None:
        self.size_bytes = size_bytes
        self._most, self._count = most, 0
        self._ledger, self._host = ledger, host
        self._idle: deque[StagingBuffer] = deque()

    @property
    def most_bytes(self) -> int:
        """The size of all buffers that may be allocated."""
        return self._most * self.size_bytes

    def take(self) -> StagingBuffer:
        """A buffer. Blocks until one is free."""
        buffer = self.try_take()
        if buffer is None:
            assert self._idle, "all buffers are in use"
            buffer = self._idle.popleft()
            buffer.ready.synchronize()
        return buffer

    def try_take(self) -> StagingBuffer | None:
        """A buffer that is free now, or None."""
        if self._idle and self._idle[0].ready.query():
            return self._idle.popleft()
        if self._count == self._most:
            return None
        self._count += 1
        self._ledger.add(_ENTRY, self.size_bytes)
        return StagingBuffer(self.size_bytes, self._host)

    def give(self, buffer: StagingBuffer, ready: Event) -> None:
        """Give a buffer back, whose content is in use until `ready`."""
        buffer.ready = ready
        self._idle.append(buffer)

    def close(self) -> None:
        """Free all buffers that were given back, once nothing uses them."""
        for buffer in self._idle:
            buffer.ready.synchronize()
        self._ledger.remove(_ENTRY, len(self._idle) * self.size_bytes)
        self._count -= len(self._idle)
        self._idle.clear()
