"""What the offloaded states of one engine share to travel between the device and where they rest.

Everything that rests off the device passes through the buffers of one pool on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from shardwise.config.sections import Offload
from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.pinned import HostMemory
from shardwise.offload.staging import Staging
from shardwise.offload.streams import Event, Streams
from shardwise.offload.weight_files import WeightFiles

_ALIGN_BYTES = 128
_ENTRY = Entry(Kind.WORK, "pool", Tier.DEVICE)

_LEAST_BYTES, _MOST_BYTES = 64 << 10, 64 << 20
"""The size of a buffer, unless it is configured. On an H200, a pool of 256 MiB buffers was 1 to 2 % faster with 2.7 B
parameters and reserved 1.9 GiB more; one of 32 MiB was 5 % slower (benchmarks/gpu_reserved.py, gpu_offload.py)."""
_ELEMENT_BYTES = 16
"""What an element takes in a buffer, about: master, two moments and a gradient."""
_MOST_BUFFERS = 8
_BUCKETS = 64
"""A rank's states are cut into at least this many buckets: then 16 buffers hold at most a quarter of them.
Otherwise a small model would have all its states on the device, and offload would save nothing
(test_planning_dry_run.test_a_higher_stage_never_holds_more_offloaded_either)."""


@dataclass
class PoolBuffer:
    """One buffer of the pool. Streams other than the compute stream wait for `ready` before they use it again."""

    buffer: Buffer
    ready: Event

    def cut(self, numel: int, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Tensors of `numel` elements side by side, one for each name."""
        flat, start, views = self.buffer.tensor, 0, {}
        for name, dtype in dtypes.items():
            stop = start + room_bytes(numel, dtype) // flat.element_size()
            views[name] = flat[start:stop].view(dtype)[:numel]
            start = stop
        return views


class DeviceBufferPool:
    """`count` buffers, each as large as the largest need so far, used in turn.

    Buffers are allocated when they are first needed and freed by `trim`, so that between two updates their memory is
    free for activations. There are more than `count` while states that were loaded ahead stay in some of them.
    """

    def __init__(self, ledger: Ledger, streams: Streams) -> None:
        self.count = 1
        self._buffer_bytes = 0
        self._ledger, self._streams = ledger, streams
        self._idle: deque[PoolBuffer] = deque()
        self._out = 0
        self._scratch: Buffer | None = None
        self._scratch_numel = 0

    def fit(self, size_bytes: int) -> None:
        """Make buffers at least this large from now on."""
        if size_bytes > self._buffer_bytes:
            self.trim()
            self._buffer_bytes = size_bytes

    @property
    def out(self) -> int:
        """How many buffers are in use."""
        return self._out

    def scratch(self, numel: int) -> torch.Tensor:
        """An fp32 tensor for the update stream alone, which is ordered after its last use by others.

        It is memory of the compute stream, as everything here: what the allocator reserves for another stream,
        activations can never use (test_gpu.test_little_more_is_needed_than_allocated).
        """
        if self._scratch is None or self._scratch.tensor.numel() < numel:
            self._drop_scratch()
            self._scratch_numel = max(self._scratch_numel, numel)
            self._scratch = self._allocate(self._scratch_numel)
            self._streams.update.wait(self._streams.now())
        return self._scratch.tensor[:numel]

    def take(self, most: int | None = None) -> PoolBuffer:
        """A buffer: a new one while there are few, or else the one that was given back first.

        With `most`, few means at most that many besides those in use.
        """
        most = max(self.count, self._out + 1) if most is None else self._out + min(most, self.count)
        if self._out + len(self._idle) < most or not self._idle:
            # The compute stream may still use this memory for the tensor that was freed here last.
            buffer = PoolBuffer(self._allocate(self._buffer_bytes // 4), self._streams.now())
        else:
            buffer = self._idle.popleft()
        self._out += 1
        if self._ledger.poison:
            # In the stream that fills the buffer next, after its last use: in another stream, NaN could overwrite
            # values that are still read, or that have just arrived.
            with self._streams.h2d:
                self._streams.h2d.wait(buffer.ready)
                buffer.buffer.tensor.fill_(float("nan"))
        return buffer

    def give(self, buffer: PoolBuffer, ready: Event) -> None:
        """Give a buffer back, whose content is in use until `ready`."""
        buffer.ready = ready
        self._out -= 1
        if buffer.buffer.size_bytes < self._buffer_bytes or self._out + len(self._idle) >= self.count:
            self._streams.free_after(ready, buffer.buffer.free)
        else:
            self._idle.append(buffer)

    def trim(self) -> None:
        """Free the buffers that are not in use. The compute stream waits for their last use first."""
        self._streams.drain()  # those that were given back while there were more than `count`
        while self._idle:
            buffer = self._idle.popleft()
            # Without the wait, the next activation would get memory that a copy still writes to:
            # test_offload_gpu.test_the_same_bits_as_on_the_device.
            self._streams.wait(buffer.ready)
            buffer.buffer.free()
        self._drop_scratch()

    def _drop_scratch(self) -> None:
        if self._scratch is not None:
            self._streams.wait(self._streams.update.mark())
            self._scratch.free()
            self._scratch = None

    def _allocate(self, numel: int) -> Buffer:
        buffer = Buffer(self._ledger, _ENTRY, numel, torch.float32, self._streams.device)
        buffer.allocate()
        return buffer


def room_bytes(numel: int, dtype: torch.dtype) -> int:
    """The bytes that a tensor takes in a buffer of the pool."""
    return -(-numel * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES


class OffloadContext:
    """Streams, device buffers, the disk's staging, and the size of buckets."""

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        settings: Offload,
        numel: int,
        host: HostMemory | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`numel` counts the elements of this rank whose states rest off the device."""
        self.host = host or host_memory(settings, device)
        self.streams = self.host.streams(device)
        self.pool = DeviceBufferPool(ledger, self.streams)
        self.ledger = ledger
        self.staging = staging
        self.weight_files: WeightFiles | None = None
        """The files that weights on the disk rest in, where they are only read."""
        self.bucket_numel = bucket_numel(settings, numel)
        self._most_buffers = settings.buffer_count or _MOST_BUFFERS

    def expect(self, buckets: int) -> None:
        """Size the pool for units of `buckets` buckets: three such units, within the configured bound."""
        self.pool.count = max(self.pool.count, min(self._most_buffers, 3 * buckets))

    def prefetch_limit(self, progress: float) -> int:
        """How many buffers prefetched states may occupy.

        At the beginning of a backward (`progress` 0) all but two, which transfers need; at its end, when activations
        have been freed, twice as many.
        """
        return self.pool.count - 2 + int(progress * self.pool.count)

    def begin_step(self) -> None:
        """A step's updates begin."""
        if self.staging is not None:
            self.staging.begin_step()

    def close(self) -> None:
        """Free the device buffers and remove the files on the disk."""
        self.streams.drain()
        self.pool.trim()
        if self.staging is not None:
            self.staging.close()
        if self.weight_files is not None:
            self.weight_files.close()


def host_memory(settings: Offload, device: torch.device) -> HostMemory:
    """Host memory, page-locked where a GPU copies from it."""
    return HostMemory(pinned=settings.pin_memory and device.type == "cuda")


def bucket_numel(settings: Offload, numel: int) -> int:
    """The most elements of a bucket, of a rank that has `numel` elements off the device."""
    share_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, numel * _ELEMENT_BYTES // _BUCKETS))
    return max(1024, (settings.buffer_bytes or share_bytes) // _ELEMENT_BYTES // 1024 * 1024)
