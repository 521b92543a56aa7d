"""Where a unit's states rest off the device, and how they come to it and go back.

Names, used throughout:
- *field*: one value for each element that this rank owns: the `master`, each moment of the optimizer's (under the
  optimizer's own word), the reduced `grads`. A field rests in a *slab* on its tier.
- *parcel*: a run of a unit's elements that travels at once, its fields side by side in a slot of the ring.
- *job*: what is due to happen to a unit's parcels while they are on the device: the update. It is issued with the
  unit's next delivery, or at once by whoever looks at the states before.

A parcel goes up the one lane, is worked on in the second and goes down the third; see `lanes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardwise.memory.ledger import Entry, Kind, Tier
from shardwise.offload.buffer_pool import Slot, room_bytes
from shardwise.offload.context import Ferry
from shardwise.offload.disk_storage import DiskSlab
from shardwise.offload.pinned import HostSlab
from shardwise.offload.staging import Chunk
from shardwise.offload.storage import Slab
from shardwise.offload.streams import PAST, Event, Lanes
from shardwise.partition.layout import Span
from shardwise.partition.policy import Policy

MASTER, GRADS = "master", "grads"
"""Fields by name; all others are the optimizer's."""

Views = dict[str, torch.Tensor]
Made = list[tuple[str, Span, torch.Tensor]]
"""Values that were made on the device, with the field and the elements they are of."""

_DELIVERY_SLOTS = 3
"""What passes through without being updated needs no more to keep a lane busy."""


class Parcel(NamedTuple):
    """Elements `span` of those that a rank owns, and the optimizer's pieces in them, by number."""

    span: Span
    pieces: tuple[int, ...]


class Job(Protocol):
    """Work on parcels."""

    def __call__(self, parcel: Parcel, views: Views) -> Made:
        """Work on a parcel's fields on the device; what was made there and shall rest."""

    def done(self) -> None:
        """The computing stream has come after it: free what it read."""


class Delivery(Protocol):
    """Values on their way to the device; a handle as those of `comm` are."""

    def issue(self) -> None:
        """See to it that they are, and that the work lane comes after them."""

    def wait(self) -> None:
        """Have the computing stream come after them."""


class Hosting(Protocol):
    """An update that is made on the host, see `hosted`."""

    def deliver(self, target: torch.Tensor | None) -> Delivery:
        """Bring what was made to `target`."""

    def finish(self) -> Event:
        """Have the host wait until it is made; when the last delivery has read it."""


class Home:
    """One unit's fields off the device."""

    def __init__(self, name: str, policy: Policy, numel: int, ferry: Ferry) -> None:
        self.name = name
        self.ferry = ferry
        self.holds_states = policy.trainable and policy.optim_tier != "device"
        self.is_updated = self.holds_states or (policy.trainable and _master_leaves(policy))
        self.numel = numel
        self._states_tier = policy.optim_tier
        self.slabs: dict[str, Slab] = {}
        self.parcels: list[Parcel] = []
        self.job: Job | None = None
        self.is_hosted = False
        self.hosted: Hosting | None = None
        self._rested: Event = PAST
        self._parcels_rested: dict[Span, Event] = {}
        self._grads_rested: Event = PAST
        self._fetched: Event = PAST
        self._loaded: dict[Span, Views] = {}
        self._slots: dict[Span, Slot] = {}
        if _master_leaves(policy):
            kind = Kind.WEIGHTS if policy.weight_dtype == policy.master_dtype else Kind.OPTIM
            self.add(MASTER, policy.master_dtype, kind, policy.master_tier)
        if policy.trainable and policy.grads_tier != "device":
            self.add(GRADS, policy.accumulate_dtype, Kind.GRADS, policy.grads_tier)

    def add(self, field: str, dtype: torch.dtype, kind: Kind = Kind.OPTIM, tier: str | None = None) -> Slab:
        """Room for one more field, by default where the optimizer's states rest."""
        ferry, tier = self.ferry, tier or self._states_tier
        entry = Entry(kind, self.name if kind is not Kind.OPTIM else f"{self.name} ({field})", Tier(tier))
        if ferry.staging is not None and tier == "disk":
            self.slabs[field] = DiskSlab(ferry.staging, ferry.ledger, entry, self._cuts, dtype)
        else:
            self.slabs[field] = HostSlab(ferry.ledger, entry, self.numel, dtype, ferry.is_pinned)
        return self.slabs[field]

    def _cuts(self) -> list[Span]:
        return [parcel.span for parcel in self.parcels]

    def divide(self, pieces: Sequence[Span]) -> None:
        """Cut the elements into parcels, at the borders of the optimizer's pieces."""
        self.parcels = list(_parcels(self.numel, pieces, self.ferry.parcel_numel))
        self.ferry.expect(len(self.parcels))

    @property
    def everything(self) -> Span:
        """All elements."""
        return Span(0, self.numel)

    @property
    def is_on_disk(self) -> bool:
        """Whether a field rests on the disk."""
        return any(isinstance(slab, DiskSlab) for slab in self.slabs.values())

    @property
    def size_bytes(self) -> int:
        """What rests here."""
        return sum(slab.size_bytes for slab in self.slabs.values())

    @property
    def disk_bytes(self) -> int:
        """What of it rests on the disk."""
        return sum(slab.size_bytes for slab in self.slabs.values() if isinstance(slab, DiskSlab))

    def leave_disk(self) -> None:
        """Let everything rest on the host from here on."""
        self.quiet()
        for field, slab in self.slabs.items():
            if isinstance(slab, DiskSlab):
                self.slabs[field] = slab.to_host(self.ferry.is_pinned)
        self._states_tier = "host"

    def __contains__(self, field: str) -> bool:
        return field in self.slabs

    @property
    def at_rest(self) -> tuple[Event, ...]:
        """When everything that was sent here has come, and everything that was asked for has been read."""
        return self._rested, self._grads_rested, self._fetched

    def fresh(self, dtype: torch.dtype) -> torch.Tensor:
        """Where new weights rest that were made on the host: the master, or where the gradients were."""
        if dtype == self.slabs[MASTER].dtype:
            return self.on_host(MASTER)
        return self.on_host(GRADS).view(torch.uint8)[: self.numel * dtype.itemsize].view(dtype)

    def on_host(self, field: str) -> torch.Tensor:
        """The host memory that a field rests in."""
        slab = self.slabs[field]
        assert isinstance(slab, HostSlab), f"{field} of {self.name} does not rest on the host"
        return slab.tensor

    def deliver(self, target: torch.Tensor | None) -> Delivery:
        """Do what is due, and bring the master to `target`, in its dtype. Whoever reads `target` waits for the arrival.

        It is memory of the computing stream's, whose earlier uses of it come first.
        """
        if self.hosted is not None:
            return self.hosted.deliver(target)
        job, self.job = self.job, None
        lanes = self.ferry.lanes
        lanes.work.wait(lanes.now())
        if job or target is not None:
            with self._fetching(is_update=job is not None):
                for parcel in self.parcels:
                    self._carry(parcel, job, target if MASTER in self else None)
        return Arrival(lanes, lanes.work.mark(), job)

    def load(self, parcel: Parcel) -> None:
        """Bring a parcel's states up ahead of the job; its gradients may still be on their way down."""
        if parcel.span not in self._loaded:
            self._open(parcel)
            self._bring(parcel, [field for field in self.slabs if field != GRADS])

    def rest(self, field: str, source: torch.Tensor, free: Callable[[], None]) -> None:
        """Take a whole field down from memory of the computing stream's, and `free` that when it is done."""
        lanes = self.ferry.lanes
        lanes.down.wait(lanes.now(), self._rested, self._finish_hosted())
        with lanes.down:
            self.slabs[field].take(lanes, self.everything, [(self.everything, source)])
        self._grads_rested = lanes.down.mark()
        lanes.leave(self._grads_rested, free)

    def recall(self, field: str, target: torch.Tensor) -> Event:
        """Bring a whole field up to memory of the computing stream's."""
        lanes = self.ferry.lanes
        lanes.up.wait(lanes.now(), self._rested, self._grads_rested)
        with lanes.up:
            self.slabs[field].bring(lanes, self.everything, target)
        self._fetched = lanes.up.mark()
        return self._fetched

    def read(self, field: str, span: Span) -> torch.Tensor:
        """Values of a field as they rest, on the host, to look at."""
        self.quiet()
        return self.slabs[field].read(span)

    def write(self, field: str, span: Span, values: torch.Tensor) -> None:
        """Replace values of a field where it rests."""
        self.quiet()
        self.slabs[field].write(span, values)

    def quiet(self) -> None:
        """Do what is due, let go of what was loaded ahead, and have the host wait until all has come down."""
        self.flush()
        self.forget()
        for event in (self._finish_hosted(), *self.at_rest):
            event.synchronize()
        for slab in self.slabs.values():
            slab.wait()

    def flush(self) -> None:
        """Do what is due now."""
        if self.job is not None or self.hosted is not None:
            self.deliver(None).wait()

    def forget(self) -> None:
        """Let go of what was loaded ahead: the fields may change where they rest."""
        lanes, staging = self.ferry.lanes, self.ferry.staging
        for parcel in self.parcels:
            if parcel.span in self._loaded:
                lanes.work.wait(lanes.up.mark())
                self._close(parcel, lanes.work.mark())
        if staging is not None and self.is_on_disk:
            staging.drop()

    def free(self) -> None:
        """Give the room back. Waits for what is under way."""
        self.job = None
        self.forget()
        for event in (self._finish_hosted(), *self.at_rest):
            event.synchronize()
        for slab in self.slabs.values():
            slab.free()
        self.slabs.clear()

    def _finish_hosted(self) -> Event:
        """From here on, what was made on the host is no longer where the gradients are."""
        hosted, self.hosted = self.hosted, None
        return PAST if hosted is None else hosted.finish()

    @contextlib.contextmanager
    def _fetching(self, is_update: bool) -> Iterator[None]:
        """Within it, a delivery fetches what it needs from the disk."""
        delivery, staging = _FromDisk(self, is_update), self.ferry.staging
        if staging is None or next(delivery.chunks(), None) is None:
            yield
            return
        staging.begin(delivery)
        try:
            yield
        finally:
            staging.end()

    def _carry(self, parcel: Parcel, job: Job | None, target: torch.Tensor | None) -> None:
        lanes, span = self.ferry.lanes, parcel.span
        is_ahead = span in self._loaded
        if not is_ahead:
            self._open(parcel, None if job else _DELIVERY_SLOTS)
            self._bring(parcel, self.slabs if job else [MASTER])
        elif job and GRADS in self:
            self._bring(parcel, [GRADS])
        views = self._loaded[span]
        lanes.work.wait(self._fetched)
        with lanes.work:
            made = job(parcel, views) if job else []
            if target is not None:
                target[span.slice].copy_(views[MASTER])
        if job is not None:
            self._take_down(parcel, views, made)
            self._close(parcel, self._rested)
        elif not is_ahead:
            self._close(parcel, lanes.work.mark())

    def _take_down(self, parcel: Parcel, views: Views, made: Made) -> None:
        lanes = self.ferry.lanes
        lanes.down.wait(lanes.work.mark())
        parts = {field: [(parcel.span, view)] for field, view in views.items() if field != GRADS}
        for field, span, values in made:
            parts.setdefault(field, []).append((span, values.view(-1)))
        with lanes.down:
            for field, values_of in parts.items():
                self.slabs[field].take(lanes, parcel.span, values_of)
        self._rested = self._parcels_rested[parcel.span] = lanes.down.mark()
        if made:
            # Made by the optimizer in the work lane, which knows nothing of the copy: they must live until it is done.
            self._rested.synchronize()

    def _close(self, parcel: Parcel, ready: Event) -> None:
        del self._loaded[parcel.span]
        self.ferry.ring.give(self._slots.pop(parcel.span), ready)

    def _open(self, parcel: Parcel, most: int | None = None) -> None:
        """Take a slot, with room for everything the parcel may need."""
        numel = parcel.span.numel
        dtypes = {field: slab.dtype for field, slab in self.slabs.items()}
        ring = self.ferry.ring
        ring.fit(sum(room_bytes(numel, dtype) for dtype in dtypes.values()))
        self._slots[parcel.span] = slot = ring.take(most)
        self._loaded[parcel.span] = slot.cut(numel, dtypes)

    def _bring(self, parcel: Parcel, fields: Iterable[str]) -> None:
        lanes, span = self.ferry.lanes, parcel.span
        # After this parcel's own way down, not that of the parcel before it: up and down run at once.
        lanes.up.wait(self._slots[span].ready, self._parcels_rested.get(span, PAST), self._grads_rested)
        with lanes.up:
            for field in fields:
                self.slabs[field].bring(lanes, span, self._loaded[span][field])
        self._fetched = lanes.up.mark()


@dataclass(frozen=True)
class _FromDisk:
    """A delivery as the staging sees it: all fields for an update, else the master alone."""

    home: Home
    is_update: bool

    def chunks(self) -> Iterator[Chunk]:
        for parcel in self.home.parcels:
            for field in list(self.home.slabs) if self.is_update else [MASTER]:
                slab = self.home.slabs.get(field)
                if isinstance(slab, DiskSlab):
                    yield from slab.chunks_in(parcel.span)


@dataclass
class Arrival:
    """A delivery under way; a handle as those of `comm` are."""

    lanes: Lanes
    event: Event
    job: Job | None

    def issue(self) -> None:
        pass

    def wait(self) -> None:
        self.lanes.wait(self.event)
        if self.job is not None:
            self.job.done()
        self.job = None


def home_for(name: str, policy: Policy, numel: int, ferry: Ferry) -> Home | None:
    """A home for a unit of which something rests off the device."""
    leaves = policy.trainable and (policy.optim_tier != "device" or policy.grads_tier != "device")
    return Home(name, policy, numel, ferry) if leaves or _master_leaves(policy) else None


def _master_leaves(policy: Policy) -> bool:
    return policy.master_tier != "device"


def _parcels(numel: int, pieces: Sequence[Span], most: int) -> Iterator[Parcel]:
    """Consecutive pieces together, up to `most` elements; without pieces, runs of so many. All elements are in one."""
    spans = pieces or [Span(start, min(start + most, numel)) for start in range(0, numel, most)]
    start, taken = 0, 0
    for index, span in enumerate(spans):
        if index > taken and span.stop - start > most:
            yield Parcel(Span(start, span.start), tuple(range(taken, index)) if pieces else ())
            start, taken = span.start, index
    if numel:
        yield Parcel(Span(start, numel), tuple(range(taken, len(pieces))))
