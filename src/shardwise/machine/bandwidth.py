"""Measured bandwidths of this machine in GB/s (1e9 bytes): host memory, host and device, GPU to GPU, disk."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations
from pathlib import Path

import torch

COPY_BYTES = 1 << 28
DISK_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
DISK_THREADS = 8


def host_copy_gbs(copy_bytes: int = COPY_BYTES) -> float:
    """A copy in host memory with all threads: bytes read plus bytes written."""
    source = torch.ones(copy_bytes, dtype=torch.uint8)
    return _gbs(2 * copy_bytes, partial(torch.empty_like(source).copy_, source))


def host_device_gbs(copy_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Pinned host memory to the first GPU, back, and both at once; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    host = [torch.empty(copy_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.empty(copy_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    copies = [(device[0], host[0], torch.cuda.Stream()), (host[1], device[1], torch.cuda.Stream())]

    def gbs(*ways: int) -> float:
        def work() -> None:
            for target, source, stream in (copies[way] for way in ways):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)

        return _gbs(len(ways) * copy_bytes, work)

    return {"host to device": gbs(0), "device to host": gbs(1), "both at once": gbs(0, 1)}


def device_links_gbs(copy_bytes: int = COPY_BYTES) -> dict[str, float]:
    """A copy from every GPU to every other."""
    rates = {}
    for pair in permutations(range(torch.cuda.device_count()), 2):
        source, target = (torch.empty(copy_bytes, dtype=torch.uint8, device=f"cuda:{index}") for index in pair)
        rates[f"cuda:{pair[0]} to cuda:{pair[1]}"] = _gbs(copy_bytes, partial(target.copy_, source))
    return rates


def disk_gbs(folder: Path, size_bytes: int = DISK_BYTES) -> dict[str, float]:
    """Writing and reading a file below `folder` with 8 threads, past the page cache (O_DIRECT) if possible."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="shardwise-env-") as inside:
        path = Path(inside) / "data"
        path.touch()
        direct = getattr(os, "O_DIRECT", 0)
        try:
            os.close(os.open(path, os.O_RDWR | direct))
        except OSError:
            direct = 0
        how = f"{DISK_THREADS} threads" + (", O_DIRECT" if direct else ", through the page cache")
        rates = {}
        for name, flags, transfer in (("write", os.O_WRONLY, os.pwritev), ("read", os.O_RDONLY, os.preadv)):
            seconds = _disk_s(path, flags | direct, transfer, size_bytes)
            rates[f"disk {name} ({how})"] = size_bytes / seconds / 1e9
        return rates


def _disk_s(path: Path, flags: int, transfer: Callable[..., int], size_bytes: int) -> float:
    part = size_bytes // DISK_THREADS // BLOCK_BYTES * BLOCK_BYTES

    def work(index: int) -> None:
        handle = os.open(path, flags)
        # O_DIRECT requires aligned buffers; anonymous maps start on a page boundary.
        with contextlib.closing(mmap.mmap(-1, BLOCK_BYTES)) as block:
            for offset in range(index * part, (index + 1) * part, BLOCK_BYTES):
                transfer(handle, [block], offset)
        if flags & os.O_WRONLY:
            os.fsync(handle)
        os.close(handle)

    start = time.perf_counter()
    with ThreadPoolExecutor(DISK_THREADS) as pool:
        list(pool.map(work, range(DISK_THREADS)))
    return time.perf_counter() - start


def _gbs(size_bytes: int, work: Callable[[], object], repeats: int = 5) -> float:
    """The rate of the fastest of several repetitions of `work`, which moves `size_bytes`."""
    times = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        work()
        _synchronize()
        times.append(time.perf_counter() - start)
    return size_bytes / min(times) / 1e9


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
