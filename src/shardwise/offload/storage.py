"""Where one state of a unit rests off the device: a storage, with one value for each element that this rank owns.

`StateStorage` is the interface. `HostStorage` is a flat tensor in host memory. `DiskStorage` is a list of chunks in the
rank's file, which pass through staging buffers on their way to the device and back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shardwise.memory.ledger import Entry, Kind, Ledger, Tier
from shardwise.offload.pinned import Chunk, HostMemory
from shardwise.offload.staging import Staging
from shardwise.offload.streams import PAST, Streams
from shardwise.partition.layout import Span
from shardwise.tensors import blank

Parts = Sequence[tuple[Span, torch.Tensor]]
"""Flat values with the elements that they belong to. Where parts overlap, the later one counts."""


Origin = Callable[[Span], torch.Tensor]
"""Where first values come from: a function of a part of some flat elements that returns the values there."""


class StateStorage(Protocol):
    """The values of one state, zeros at first.

    `read`, `write` and `free` act at once, so the caller waits for pending copies before it calls them
    (`UnitStates.synchronize`). `to_device` and `from_device` are asynchronous.

    travels_directly  whether the values are copied to the device all at once, without the staging of a disk
    """

    travels_directly: bool

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def size_bytes(self) -> int:
        """The bytes of the values, without the padding of a disk's pages."""

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        """What the optimizer's state holds for `span` between updates: the values themselves, or a placeholder."""

    def read(self, span: Span) -> torch.Tensor:
        """The values of `span` in host memory, for reading only."""

    def write(self, span: Span, values: torch.Tensor) -> None:
        """Replace the values of `span`."""

    def load(self, span: Span, origin: Origin, part: Span) -> None:
        """Take `part` of an origin as the first values of `span`."""

    def to_device(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        """Copy the values of the bucket `span` to the device, in the current stream."""

    def from_device(self, streams: Streams, span: Span, parts: Parts) -> None:
        """Replace values of the bucket `span` with `parts`, which are on the device, in the current stream."""

    def wait(self) -> None:
        """Block the host until all values that were copied from the device are where they rest."""

    def free(self) -> None:
        """Free the memory, or the part of the file."""


class HostStorage:
    """A state in one flat tensor of host memory."""

    travels_directly = True

    def __init__(self, ledger: Ledger, entry: Entry, numel: int, dtype: torch.dtype, host: HostMemory) -> None:
        self.dtype = dtype
        self.size_bytes = numel * dtype.itemsize
        self._ledger, self._entry = ledger, entry
        self.tensor = host.zeros(numel, dtype)
        ledger.add(entry, self.size_bytes)

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        return self.tensor[span.slice].view(shape)

    def read(self, span: Span) -> torch.Tensor:
        return self.tensor[span.slice]

    def write(self, span: Span, values: torch.Tensor) -> None:
        self.tensor[span.slice].copy_(values)

    def load(self, span: Span, origin: Origin, part: Span) -> None:
        self.write(span, origin(part))

    def to_device(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        streams.copy_to_device(target, self.tensor[span.slice])

    def from_device(self, streams: Streams, span: Span, parts: Parts) -> None:
        for part, values in parts:
            streams.copy_to_host(self.tensor[part.slice], values)

    def wait(self) -> None:
        """Nothing to wait for: the caller has waited for the copies, and they end here."""

    def free(self) -> None:
        """Free the memory once no view of it is left. No copy may be pending."""
        self._ledger.remove(self._entry, self.size_bytes)
        self.size_bytes = 0
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)


class DiskStorage:
    """A state in chunks of the rank's file. Between updates the optimizer's state holds NaN for each of its values."""

    travels_directly = False

    def __init__(
        self, staging: Staging, ledger: Ledger, entry: Entry, buckets: Callable[[], Sequence[Span]], dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self._staging, self._ledger, self._entry = staging, ledger, entry
        self._buckets = buckets
        self._chunks: list[Chunk] | None = None
        self._placeholder = blank(dtype)

    @property
    def chunks(self) -> list[Chunk]:
        """Where the values rest. Allocated at the first use, because the unit is divided into buckets after this
        storage is made, and a chunk must not cross the border of a bucket."""
        if self._chunks is None:
            self._chunks = self._staging.allocate(self._buckets(), self.dtype, self._entry.kind is Kind.WEIGHTS)
            self._ledger.add(self._entry, self._file_bytes())
        return self._chunks

    @property
    def size_bytes(self) -> int:
        return sum(span.numel for span in self._buckets()) * self.dtype.itemsize

    def chunks_in(self, span: Span) -> list[Chunk]:
        """The chunks that hold some of `span`."""
        first = max(0, bisect_right(self.chunks, span.start, key=lambda chunk: chunk.span.start) - 1)
        last = bisect_right(self.chunks, span.stop - 1, key=lambda chunk: chunk.span.start)
        return self.chunks[first:last] if span else []

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        return self._placeholder.expand(shape)

    def read(self, span: Span) -> torch.Tensor:
        values = torch.zeros(span.numel, dtype=self.dtype, device="cpu")
        written = [chunk for chunk in self.chunks_in(span) if chunk.is_written]
        for chunk, buffer in self._staging.read(written):
            part = chunk.span.intersect(span)
            source = part.shift(-chunk.span.start)
            values[part.shift(-span.start).slice] = buffer.values(chunk, self.dtype)[source.slice]
        return values

    def write(self, span: Span, values: torch.Tensor) -> None:
        staging, flat = self._staging, values.reshape(-1)
        staging.drop()  # what is read ahead holds the old values
        for chunk in self.chunks_in(span):
            buffer = staging.outgoing.take()
            target, part = buffer.values(chunk, self.dtype), chunk.span.intersect(span)
            if part != chunk.span and chunk.is_written:
                chunk.file.read(chunk.extent, buffer.bytes(chunk)).result()
            elif part != chunk.span:
                target.zero_()
            target[part.shift(-chunk.span.start).slice].copy_(flat[part.shift(-span.start).slice])
            staging.send(chunk, buffer, PAST)

    def load(self, span: Span, origin: Origin, part: Span) -> None:
        self.write(span, origin(part))

    def to_device(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        for chunk in self.chunks_in(span):
            part = target[chunk.span.shift(-span.start).slice]
            if not chunk.is_written:
                part.zero_()
                continue
            buffer = self._staging.fetch(chunk)
            streams.copy_to_device(part, buffer.values(chunk, self.dtype))
            streams.moved_bytes["disk to host"] += part.numel() * self.dtype.itemsize
            # The next chunk is read into this buffer by a thread that knows nothing of streams: not before the copy
            # has ended (test_disk.test_a_buffer_waits_for_the_copy_that_reads_it).
            self._staging.incoming.give(buffer, streams.h2d.mark())

    def from_device(self, streams: Streams, span: Span, parts: Parts) -> None:
        for chunk in self.chunks_in(span):
            buffer = self._staging.outgoing.take()
            target = buffer.values(chunk, self.dtype)
            if chunk.span.intersect(parts[0][0]) != chunk.span:
                target.zero_()  # the first part does not cover the chunk, and the buffer holds another chunk's values
            for part, values in parts:
                if both := chunk.span.intersect(part):
                    inside, source = both.shift(-chunk.span.start), both.shift(-part.start)
                    streams.copy_to_host(target[inside.slice], values[source.slice])
            streams.moved_bytes["host to disk"] += target.numel() * self.dtype.itemsize
            # The write starts when the copy has ended:
            # test_disk.test_what_is_copied_from_the_device_is_written_when_it_has_come.
            self._staging.send(chunk, buffer, streams.d2h.mark())

    def to_host(self, host: HostMemory) -> HostStorage:
        """The same values in host memory. This storage is freed."""
        everything = Span(0, self.size_bytes // self.dtype.itemsize)
        storage = HostStorage(self._ledger, self._entry._replace(tier=Tier.HOST), everything.numel, self.dtype, host)
        storage.write(everything, self.read(everything))
        self.free()
        return storage

    def wait(self) -> None:
        self._staging.wait(self._chunks or ())

    def free(self) -> None:
        self._ledger.remove(self._entry, self._file_bytes())
        if self._chunks is not None:
            self._chunks = []

    def _file_bytes(self) -> int:
        """What the chunks take of the file, in whole pages."""
        return sum(chunk.extent.size_bytes for chunk in self._chunks or ())
