"""The buffers on the device through which everything passes that rests off the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.streams import Event, Streams

_ALIGN_BYTES = 128
_ENTRY = Entry(Kind.WORK, "pool", Tier.DEVICE)


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
        activations can never use (test_gpu.test_little_more_is_reserved_than_allocated).
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
