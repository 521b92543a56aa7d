"""Host memory that the device copies from and to: page-locked where asked for, and of exactly the size asked for.

torch's own pinned allocator rounds sizes up to powers of two, which can double what rests on the host. `HostMemory`
asks the CUDA runtime instead (test_offload_gpu.test_host_memory_is_right_sized).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from functools import cache
from pathlib import Path

import torch

from shardwise.offload.streams import Streams


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
