"""The pool: a few buffers on the device through which everything passes that rests elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from shardwise.memory import ledger
from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.streams import Event, Streams

_ALIGN_BYTES = 128
_ENTRY = Entry(Kind.WORK, "pool", Tier.DEVICE)


@dataclass
class PoolBuffer:
    """One buffer; free for its next use after `ready`."""

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
    """`count` slots, each as large as the largest need so far, in use one after the other.

    Slots are allocated when they are first needed and given back by `trim`, so that between an update and the next the
    device has the memory for activations. There are more while things are left in some of them.
    """

    def __init__(self, ledger: Ledger, streams: Streams) -> None:
        self.count = 1
        self._slot_bytes = 0
        self._ledger, self._streams = ledger, streams
        self._idle: deque[PoolBuffer] = deque()
        self._out = 0
        self._scratch: Buffer | None = None

    def fit(self, size_bytes: int) -> None:
        """Make slots large enough from here on."""
        if size_bytes > self._slot_bytes:
            self.trim()
            self._slot_bytes = size_bytes

    @property
    def out(self) -> int:
        """How many slots something is left in."""
        return self._out

    def scratch(self, numel: int) -> torch.Tensor:
        """Room in fp32 for the work lane alone, where one thing comes after the other: allocated and freed there."""
        if self._scratch is None or self._scratch.tensor.numel() < numel:
            self._drop_scratch()
            with self._streams.update:
                self._scratch = self._allocate(numel)
        return self._scratch.tensor[:numel]

    def take(self, most: int | None = None) -> PoolBuffer:
        """A slot, new or the one that was given back first; of `most` slots, where not all are needed."""
        most = max(self.count, self._out + 1) if most is None else self._out + min(most, self.count)
        if self._out + len(self._idle) < most or not self._idle:
            slot = PoolBuffer(self._allocate(self._slot_bytes // 4), self._streams.now())
        else:
            slot = self._idle.popleft()
        self._out += 1
        if ledger.POISON:
            with self._streams.h2d:
                self._streams.h2d.wait(slot.ready)
                slot.buffer.tensor.fill_(float("nan"))
        return slot

    def give(self, slot: PoolBuffer, ready: Event) -> None:
        """Give a slot back; its content is in use until `ready`."""
        slot.ready = ready
        self._out -= 1
        if slot.buffer.size_bytes < self._slot_bytes or self._out + len(self._idle) >= self.count:
            self._streams.leave(ready, slot.buffer.free)
        else:
            self._idle.append(slot)

    def trim(self) -> None:
        """Free the slots that nothing is left in, once the computing stream comes after their last use."""
        while self._idle:
            slot = self._idle.popleft()
            self._streams.wait(slot.ready)
            slot.buffer.free()
        self._drop_scratch()

    def _drop_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.free()
            self._scratch = None

    def _allocate(self, numel: int) -> Buffer:
        buffer = Buffer(self._ledger, _ENTRY, numel, torch.float32, self._streams.device)
        buffer.allocate()
        return buffer


def room_bytes(numel: int, dtype: torch.dtype) -> int:
    """What a tensor takes in a slot."""
    return -(-numel * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
