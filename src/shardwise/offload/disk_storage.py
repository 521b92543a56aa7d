"""A storage on the disk: a field in chunks of the rank's file, which pass through staging buffers on their way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from shardwise.memory.ledger import Entry, Kind, Ledger, Tier
from shardwise.offload.pinned import HostStorage
from shardwise.offload.staging import Chunk, Staging
from shardwise.offload.storage import Parts
from shardwise.offload.streams import PAST, Streams
from shardwise.partition.layout import Span


class DiskStorage:
    """A storage whose values rest on the disk. While they do, a NaN stands for each of them in the optimizer."""

    def __init__(
        self, staging: Staging, ledger: Ledger, entry: Entry, cuts: Callable[[], Sequence[Span]], dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self._staging, self._ledger, self._entry = staging, ledger, entry
        self._cuts = cuts
        nothing = float("nan") if dtype.is_floating_point else 0
        self._stand_in = torch.full((), nothing, dtype=dtype, device="cpu")

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Where the values rest. Room is taken with the first look at it: the unit is divided by then."""
        chunks = self._staging.allocate(self._cuts(), self.dtype, self._entry.kind is Kind.WEIGHTS)
        self._ledger.add(self._entry, sum(chunk.extent.size_bytes for chunk in chunks))
        return chunks

    @property
    def size_bytes(self) -> int:
        return sum(span.numel for span in self._cuts()) * self.dtype.itemsize

    def chunks_in(self, span: Span) -> list[Chunk]:
        """The chunks that hold some of `span`."""
        first = max(0, bisect_right(self.chunks, span.start, key=lambda chunk: chunk.span.start) - 1)
        last = bisect_right(self.chunks, span.stop - 1, key=lambda chunk: chunk.span.start)
        return self.chunks[first:last] if span else []

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        return self._stand_in.expand(shape)

    def read(self, span: Span) -> torch.Tensor:
        values = torch.zeros(span.numel, dtype=self.dtype, device="cpu")
        written = [chunk for chunk in self.chunks_in(span) if chunk.is_written]
        for chunk, buffer in self._staging.look(written):
            part = chunk.span.intersect(span)
            values[part.shift(-span.start).slice] = buffer.values(chunk, self.dtype)[
                part.shift(-chunk.span.start).slice
            ]
        return values

    def write(self, span: Span, values: torch.Tensor) -> None:
        staging, flat = self._staging, values.reshape(-1)
        staging.drop()
        for chunk in self.chunks_in(span):
            buffer = staging.outgoing.need()
            target, part = buffer.values(chunk, self.dtype), chunk.span.intersect(span)
            if part != chunk.span and chunk.is_written:
                chunk.file.read(chunk.extent, buffer.bytes(chunk)).result()
            elif part != chunk.span:
                target.zero_()
            target[part.shift(-chunk.span.start).slice].copy_(flat[part.shift(-span.start).slice])
            staging.send(chunk, buffer, PAST)

    def bring(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        for chunk in self.chunks_in(span):
            place = target[chunk.span.shift(-span.start).slice]
            if not chunk.is_written:
                place.zero_()
                continue
            buffer = self._staging.fetch(chunk)
            streams.bring(place, buffer.values(chunk, self.dtype))
            streams.moved_bytes["disk to host"] += place.numel() * self.dtype.itemsize
            self._staging.incoming.give_after_copy(buffer, streams.h2d.mark())

    def take(self, streams: Streams, span: Span, parts: Parts) -> None:
        for chunk in self.chunks_in(span):
            buffer = self._staging.outgoing.need()
            target = buffer.values(chunk, self.dtype)
            if chunk.span.intersect(parts[0][0]) != chunk.span:
                target.zero_()
            for part, values in parts:
                if both := chunk.span.intersect(part):
                    inside, source = both.shift(-chunk.span.start), both.shift(-part.start)
                    streams.take(target[inside.slice], values[source.slice])
            streams.moved_bytes["host to disk"] += target.numel() * self.dtype.itemsize
            self._staging.send(chunk, buffer, streams.d2h.mark())

    def to_host(self, pinned: bool) -> HostStorage:
        """The same values in host memory; the room here is given back."""
        everything = Span(0, self.size_bytes // self.dtype.itemsize)
        storage = HostStorage(self._ledger, self._entry._replace(tier=Tier.HOST), everything.numel, self.dtype, pinned)
        storage.write(everything, self.read(everything))
        self.free()
        return storage

    def wait(self) -> None:
        """Have the host wait until all values are where they rest."""
        if "chunks" in self.__dict__:
            self._staging.wait(self.chunks)

    def free(self) -> None:
        if "chunks" in self.__dict__:
            self._ledger.remove(self._entry, sum(chunk.extent.size_bytes for chunk in self.chunks))
            self.chunks.clear()
