"""Staging: a rank's files on the disk, and the page-locked buffers between them and the device.

Reads pass through `incoming` buffers and are issued ahead of need (see `read_ahead`); writes pass through `outgoing`
buffers. So reading, updating and writing overlap.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from shardwise.config.sections import Offload
from shardwise.memory.ledger import Ledger
from shardwise.offload.disk_file import DiskDemand, DiskFile, aligned
from shardwise.offload.pinned import HostMemory
from shardwise.offload.read_ahead import DiskTransfer, ReadAhead
from shardwise.offload.staging_buffers import Chunk, RequestDone, StagingBuffer, StagingBuffers
from shardwise.offload.streams import Event
from shardwise.partition.layout import Span

_BUFFER_BLOCKS = 8
_BUFFERS, _LEAST_BUFFERS = 64, 4
_MOST_BYTES = 512 << 20
"""The size of all buffers of one direction."""


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
        cuts = [
            Span(start, min(start + most, span.stop)) for span in spans for start in range(span.start, span.stop, most)
        ]
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
