"""The ferry: what the units of an engine share on the way between the device and where their fields rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise.config import Offload
from shardwise.memory.ledger import Ledger
from shardwise.offload.buffer_pool import Ring
from shardwise.offload.staging import Staging
from shardwise.offload.streams import Lanes

if TYPE_CHECKING:
    from shardwise.offload.unit_states import Home

_SLOT_BYTES = 256 << 20
_ELEMENT_BYTES = 16
"""What an element takes in a slot, about: master, two moments and a gradient."""
_MOST_SLOTS = 8


class Ferry:
    """What the homes of an engine share: lanes, ring, and the size of parcels."""

    def __init__(self, device: torch.device, ledger: Ledger, settings: Offload) -> None:
        self.lanes = Lanes(device)
        self.ring = Ring(ledger, self.lanes)
        self.ledger = ledger
        self.is_pinned = settings.pin_memory and device.type == "cuda"
        self.parcel_numel = max(1024, (settings.buffer_bytes or _SLOT_BYTES) // _ELEMENT_BYTES // 1024 * 1024)
        self._most_slots = settings.buffer_count or _MOST_SLOTS
        self.staging: Staging | None = None

    def expect(self, parcels: int) -> None:
        """Make room in the ring for units of so many parcels: three of them, within the bound."""
        self.ring.count = max(self.ring.count, min(self._most_slots, 3 * parcels))

    def load_ahead(self, homes: Iterable[Home], progress: float) -> None:
        """Bring the states that are updated first, while the up lane has nothing else to do.

        At the beginning of a backward (`progress` 0) as far as the ring has room, with two slots left for what passes;
        at its end, when activations have made room, twice as much.
        """
        most = self.ring.count - 2 + int(progress * self.ring.count)
        for home in homes:
            for parcel in home.parcels:
                if self.ring.out >= most or home.is_on_disk:  # what is on the disk is read ahead by the staging
                    return
                home.load(parcel)

    def turn(self) -> None:
        """A step's updates begin."""
        if self.staging is not None:
            self.staging.turn()

    def close(self) -> None:
        """Give back what the device lent, and remove what is left on the disk."""
        self.lanes.arrive()
        self.ring.trim()
        if self.staging is not None:
            self.staging.close()
