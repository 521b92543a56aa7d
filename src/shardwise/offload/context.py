"""The offload: what the units of an engine share on the way between the device and where their fields rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise.config.sections import Offload
from shardwise.memory.ledger import Ledger
from shardwise.offload.buffer_pool import DeviceBufferPool
from shardwise.offload.staging import Staging
from shardwise.offload.streams import Streams

if TYPE_CHECKING:
    from shardwise.offload.unit_states import UnitStates

_SLOT_BYTES = 256 << 20
_ELEMENT_BYTES = 16
"""What an element takes in a slot, about: master, two moments and a gradient."""
_MOST_SLOTS = 8


class OffloadContext:
    """What the offloaded of an engine share: streams, pool, and the size of buckets."""

    def __init__(self, device: torch.device, ledger: Ledger, settings: Offload) -> None:
        self.streams = Streams(device)
        self.pool = DeviceBufferPool(ledger, self.streams)
        self.ledger = ledger
        self.is_pinned = settings.pin_memory and device.type == "cuda"
        self.bucket_numel = max(1024, (settings.buffer_bytes or _SLOT_BYTES) // _ELEMENT_BYTES // 1024 * 1024)
        self._most_slots = settings.buffer_count or _MOST_SLOTS
        self.staging: Staging | None = None

    def expect(self, buckets: int) -> None:
        """Make room in the pool for units of so many buckets: three of them, within the bound."""
        self.pool.count = max(self.pool.count, min(self._most_slots, 3 * buckets))

    def load_ahead(self, offloaded: Iterable[UnitStates], progress: float) -> None:
        """Bring the states that are updated first, while the up lane has nothing else to do.

        At the beginning of a backward (`progress` 0) as far as the pool has room, with two slots left for what passes;
        at its end, when activations have made room, twice as much.
        """
        most = self.pool.count - 2 + int(progress * self.pool.count)
        for states in offloaded:
            for bucket in states.buckets:
                if self.pool.out >= most or states.is_on_disk:  # what is on the disk is read ahead by the staging
                    return
                states.load(bucket)

    def turn(self) -> None:
        """A step's updates begin."""
        if self.staging is not None:
            self.staging.turn()

    def close(self) -> None:
        """Give back what the device lent, and remove what is left on the disk."""
        self.streams.arrive()
        self.pool.trim()
        if self.staging is not None:
            self.staging.close()
