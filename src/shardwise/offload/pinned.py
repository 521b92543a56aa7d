"""Host memory that the device copies from and to: page-locked where asked for, and of exactly the size asked for.

torch's own pinned allocator rounds sizes up to powers of two, which can double what rests on the host. `HostMemory`
asks the CUDA runtime instead (test_offload_gpu.test_host_memory_is_right_sized).

`StagingBuffers` are those between the disk and the device. A *chunk* is what one of them carries: some elements of a
state, in one extent of a file. Their number is fixed, whatever the size of the model. One is used again when its
`ready` event has happened: the copy to the device, or the request to the disk, that uses its content has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shardwise.memory.ledger import Entry, Kind, Ledger, Tier
from shardwise.offload.disk_file import DiskFile, Extent
from shardwise.offload.streams import PAST, Event, Streams
from shardwise.partition.layout import Span

_ENTRY = Entry(Kind.WORK, "staging", Tier.HOST)


class HostMemory:
    """Allocates the host memory of one engine. A dry run passes in its own, to tell host memory from the device's.

    >>> HostMemory().zeros(3, torch.float32)
    tensor([0., 0., 0.])
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros."""
        return page_locked(numel, dtype) if self.pinned and numel else torch.zeros(numel, dtype=dtype)

    def pages(self, size_bytes: int) -> torch.Tensor:
        """`size_bytes` bytes that start on a page boundary, as direct I/O requires."""
        if self.pinned:
            return page_locked(size_bytes, torch.uint8)
        return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)

    def streams(self, device: torch.device) -> Streams:
        """The streams that copy between this memory and a device."""
        return Streams(device)


def page_locked(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Page-locked zeros, freed with the last tensor that shares them."""
    torch.cuda.init()
    size_bytes, pointer = numel * dtype.itemsize, ctypes.c_void_p()
    _check(_runtime().cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size_bytes), ctypes.c_uint(0)))
    assert pointer.value is not None
    pages = (ctypes.c_byte * size_bytes).from_address(pointer.value)
    # `frombuffer` keeps `pages` alive for as long as a tensor shares this memory, so the finalizer frees it no earlier.
    # It does not run at exit: the driver may be unloaded by then, and the process returns the memory anyway.
    weakref.finalize(pages, _runtime().cudaFreeHost, pointer).atexit = False
    return torch.frombuffer(pages, dtype=dtype, count=numel).zero_()


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime library that torch has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in maps if "libcudart" in line})
    if not paths:
        raise MemoryError(
            "torch has no libcudart of its own loaded here, so page-locked memory cannot be allocated: set "
            "offload.pin_memory to false, which makes copies slower"
        )
    return ctypes.CDLL(paths[0])


def _check(status: int) -> None:
    if status:
        raise MemoryError(
            f"host memory could not be page-locked (CUDA error {status}): free host memory, or set offload.pin_memory "
            "to false, which makes copies slower"
        )


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
