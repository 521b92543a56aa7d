"""Buffers whose storage is freed and allocated again, and the ledger that accounts for every byte of them.

A `Buffer` is one flat tensor that keeps its identity while its storage is freed and allocated again. That identity
matters: autograd saves views of weights (`weight.t()`), and a view made in the forward must see the refilled storage
in the backward. A read of freed storage crashes the process, so the owner of a buffer redirects all readers before it
frees it.

The `Ledger` holds what is live now and what was live at the peak, by kind, unit and tier. Every allocation of the
engine goes through it; test_memory.test_the_ledger_knows_the_peak compares it with an observer from outside.
"""

from __future__ import annotations

import enum
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch

from shardwise.partition.layout import Layout, Span

POISON_VARIABLE = "SHARDWISE_POISON"
"""The environment variable that makes `Ledger.from_environment` poison buffers."""

PAGE_BYTES = 20 * 2**20
"""The granularity in which torch's allocator maps and returns GPU memory, except for small tensors."""


class Kind(enum.Enum):
    """What a buffer is for. WORK is temporary: receive buffers and casts, freed within a phase."""

    WEIGHTS = "weights"
    GRADS = "grads"
    OPTIM = "optim"
    WORK = "work"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call, and the ledger hashes often


class Tier(enum.Enum):
    """Where a buffer rests."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__


class Entry(NamedTuple):
    """One line of the ledger: which kind of which unit, on which tier."""

    kind: Kind
    unit: str
    tier: Tier


class Ledger:
    """Live bytes by entry, and the same at the highest total so far.

    With `poison`, buffers that are allocated under it are filled with NaN, so that a value that is read before it is
    written, or before the copy that brings it has ended, shows up in the results.

    >>> ledger = Ledger()
    >>> ledger.add(Entry(Kind.WEIGHTS, "head", Tier.DEVICE), 1024)
    >>> ledger.total_bytes, ledger.by_kind()
    (1024, {'weights': 1024})
    """

    def __init__(self, poison: bool = False) -> None:
        self.poison = poison
        self.live: Counter[Entry] = Counter()
        self.total_bytes = 0
        self.peak_bytes = 0
        self._tiers: Counter[Tier] = Counter()
        self._tier_peaks: Counter[Tier] = Counter()
        self._at_peak: Counter[Entry] = Counter()
        self.buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()

    @classmethod
    def from_environment(cls) -> Ledger:
        """A ledger that poisons buffers if the environment variable SHARDWISE_POISON is 1."""
        return cls(poison=os.environ.get(POISON_VARIABLE) == "1")

    def add(self, entry: Entry, size_bytes: int) -> None:
        if not size_bytes:
            return
        self.live[entry] += size_bytes
        self.total_bytes += size_bytes
        tier = entry.tier
        self._tiers[tier] += size_bytes
        if self._tiers[tier] > self._tier_peaks[tier]:
            self._tier_peaks[tier] = self._tiers[tier]
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes
            self._at_peak = self.live.copy()

    def remove(self, entry: Entry, size_bytes: int) -> None:
        if not size_bytes:
            return
        left = self.live[entry] = self.live[entry] - size_bytes
        self._tiers[entry.tier] -= size_bytes
        self.total_bytes -= size_bytes
        assert left >= 0, f"{entry}: more was freed than allocated"

    def move(self, entry: Entry, tier: Tier) -> Entry:
        """Count what an entry holds on another tier; returns its entry there."""
        moved, size_bytes = entry._replace(tier=tier), self.live[entry]
        self.remove(entry, size_bytes)
        self.add(moved, size_bytes)
        return moved

    def set_bytes(self, entry: Entry, size_bytes: int) -> None:
        """Set an entry to `size_bytes`: for state that torch's optimizers allocate themselves."""
        change = size_bytes - self.live[entry]
        if change:
            (self.add if change > 0 else self.remove)(entry, abs(change))

    def by_kind(self, at_peak: bool = False) -> dict[str, int]:
        """Bytes by kind, now or at the peak."""
        totals: Counter[str] = Counter()
        for entry, size_bytes in (self._at_peak if at_peak else self.live).items():
            totals[entry.kind.value] += size_bytes
        return {kind: size_bytes for kind, size_bytes in totals.items() if size_bytes}

    def by_tier(self, at_peak: bool = False) -> dict[str, int]:
        """Live bytes by tier, or the most that each tier has held."""
        totals = self._tier_peaks if at_peak else self._tiers
        return {tier.value: size_bytes for tier, size_bytes in totals.items() if size_bytes}


class Buffer:
    """One flat tensor, without storage at first, whose storage is allocated and freed under an entry of the ledger."""

    def __init__(self, ledger: Ledger, entry: Entry, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self.size_bytes = numel * dtype.itemsize
        self.live = False
        self._device = device
        self._ledger = ledger
        self.entry = entry
        self._current = entry  # another one while `offload` has moved the values
        self.gaps: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._storage = self.tensor.untyped_storage()
        ledger.buffers.add(self)
        self._storage.resize_(0)

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """The tensors of a layout as views that stay valid from one `allocate` to the next. `gaps` gets the padding."""
        self.gaps = self._keep((gap, (gap.numel,)) for gap in layout.gaps)
        return self._keep((slot.span, slot.spec.shape) for slot in layout.slots)

    def view(self, span: Span) -> torch.Tensor:
        """One part as a view that stays valid in the same way."""
        return self._keep([(span, (span.numel,))])[0]

    def _keep(self, places: Iterable[tuple[Span, tuple[int, ...]]]) -> list[torch.Tensor]:
        # torch refuses a view beyond the end of its storage, so the storage must exist while the views are made.
        if not self.live:
            self._storage.resize_(self.size_bytes)
        views = [self.tensor[span.slice].view(shape) for span, shape in places]
        self._views += views
        if not self.live:
            self._storage.resize_(0)
        return views

    def allocate(self) -> torch.Tensor:
        """Allocate the tensor's storage. Its content is undefined."""
        assert not self.live, f"{self._current} is already allocated"
        self._storage.resize_(self.size_bytes)
        self._ledger.add(self._current, self.size_bytes)
        self.live = True
        if self._ledger.poison:
            self.tensor.fill_(float("nan") if self.tensor.is_floating_point() else 85)
        return self.tensor

    def offload(self, host: torch.Tensor) -> None:
        """Move the values into `host`, and all views with them, until `fetch` or `free`."""
        host.copy_(self.tensor)
        self._move(host, self.entry._replace(tier=Tier.HOST))

    def fetch(self) -> None:
        """Move the values back from the host, if they are there, and all views with them."""
        if self._current is not self.entry:
            self._move(self.tensor.to(self._device, copy=True), self.entry)

    def _move(self, fresh: torch.Tensor, entry: Entry) -> None:
        self._ledger.remove(self._current, self.size_bytes)
        self._current = entry
        self._ledger.add(entry, self.size_bytes)
        self._rest_in(fresh)

    def free(self) -> None:
        """Free the storage. No view of the tensor may be read until the next `allocate`."""
        if self.live:
            if self._current is not self.entry or not self._storage.resizable():
                self._renew()
            self._storage.resize_(0)
            self._ledger.remove(self._current, self.size_bytes)
            self._current = self.entry
            self.live = False

    def leave(self) -> None:
        """Free the storage for the last time: on the CPU, views that the user has keep it.

        A process that read such a view ended in a segmentation fault
        (test_engine.test_views_of_the_user_outlive_what_they_are_views_of).
        """
        if self.live and self.tensor.device.type == "cpu":
            self._renew()
        self.free()

    def _renew(self) -> None:
        """Move all views to new storage and leave the old one to the user, who has a view of it. A numpy array also
        forbids to resize it.

        test_engine.test_views_of_the_user_outlive_what_they_are_views_of
        """
        self._rest_in(torch.empty_like(self.tensor, device=self._device))

    def _rest_in(self, fresh: torch.Tensor) -> None:
        for view in self._views:
            view.data = fresh.as_strided(view.shape, view.stride(), view.storage_offset())
        self.tensor.data = fresh
        self._storage = fresh.untyped_storage()
