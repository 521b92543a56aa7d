"""Host memory that the device copies from and to: of just the size asked for, page-locked where that helps.

torch's own pinned allocator rounds up to powers of two, which can double what rests on the host. So each storage is
allocated by the CUDA runtime itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from shardwise.memory.ledger import Entry, Ledger
from shardwise.offload.storage import Parts
from shardwise.offload.streams import Streams
from shardwise.partition.layout import Span


class HostStorage:
    """A storage that is one flat tensor in host memory, zeros at first."""

    def __init__(self, ledger: Ledger, entry: Entry, numel: int, dtype: torch.dtype, pinned: bool) -> None:
        self.dtype = dtype
        self.size_bytes = numel * dtype.itemsize
        self._ledger, self._entry = ledger, entry
        with making():
            self.tensor = page_locked(numel, dtype) if pinned and numel else torch.zeros(numel, dtype=dtype)
        ledger.add(entry, self.size_bytes)

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        return self.tensor[span.slice].view(shape)

    def read(self, span: Span) -> torch.Tensor:
        return self.tensor[span.slice]

    def write(self, span: Span, values: torch.Tensor) -> None:
        self.tensor[span.slice].copy_(values)

    def bring(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        streams.bring(target, self.tensor[span.slice])

    def take(self, streams: Streams, span: Span, parts: Parts) -> None:
        for part, values in parts:
            streams.take(self.tensor[part.slice], values)

    def wait(self) -> None:
        """What left the device is here."""

    def free(self) -> None:
        """Give the memory back, as soon as nobody holds a view of it; no copy may be under way."""
        self._ledger.remove(self._entry, self.size_bytes)
        self.size_bytes = 0
        self.tensor = torch.empty(0, dtype=self.tensor.dtype)


def page_aligned(size_bytes: int, pinned: bool) -> torch.Tensor:
    """So many bytes of host memory on a page boundary, as direct I/O demands."""
    if pinned:
        return page_locked(size_bytes, torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


_is_making = False


def is_making() -> bool:
    """Whether host memory is being made just now. A dry run, in which host and device are both on the CPU, tells them
    apart by it."""
    return _is_making


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Around what makes host memory."""
    global _is_making
    _is_making = True
    try:
        yield
    finally:
        _is_making = False


def page_locked(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Page-locked zeros of just this size."""
    torch.cuda.init()
    size_bytes, pointer = numel * dtype.itemsize, ctypes.c_void_p()
    _check(_runtime().cudaHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size_bytes), ctypes.c_uint(0)))
    assert pointer.value is not None
    pages = (ctypes.c_byte * size_bytes).from_address(pointer.value)
    # torch keeps `pages` for as long as a tensor over them lives. At exit the driver may be gone before us.
    weakref.finalize(pages, _runtime().cudaFreeHost, pointer).atexit = False
    return torch.frombuffer(pages, dtype=dtype, count=numel).zero_()


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in maps if "libcudart" in line})
    if not paths:
        raise MemoryError(
            "the CUDA runtime that torch uses is not a library of its own here, so no page-locked memory can be asked "
            "of it: set offload.pin_memory to false, which makes copies slower"
        )
    return ctypes.CDLL(paths[0])


def _check(status: int) -> None:
    if status:
        raise MemoryError(
            f"host memory could not be page-locked (CUDA error {status}): free host memory, or set offload.pin_memory "
            "to false, which makes copies slower"
        )
