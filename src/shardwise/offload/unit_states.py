"""Where a unit's states rest off the device, and how they come to it and go back.

Names, used throughout:
- *field*: one value for each element that this rank owns: the `master`, each moment of the optimizer's (under the
  optimizer's own word), the reduced `grads`. A field rests in a *storage* on its tier.
- *bucket*: a run of a unit's elements that travels at once, its fields side by side in a slot of the pool.
- *job*: what is due to happen to a unit's buckets while they are on the device: the update. It is issued with the
  unit's next delivery, or at once by whoever looks at the states before.

A bucket goes up the one lane, is worked on in the second and goes down the third; see `streams`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardwise.memory.ledger import Entry, Kind, Tier
from shardwise.offload.buffer_pool import PoolBuffer, room_bytes
from shardwise.offload.context import OffloadContext
from shardwise.offload.staging_buffers import Chunk
from shardwise.offload.storage import DiskStorage, HostStorage, StateStorage
from shardwise.offload.streams import PAST, Event, Streams
from shardwise.partition.layout import Span
from shardwise.partition.policy import Policy

MASTER, GRADS = "master", "grads"
"""Fields by name; all others are the optimizer's."""

Views = dict[str, torch.Tensor]
Made = list[tuple[str, Span, torch.Tensor]]
"""Values that were made on the device, with the field and the elements they are of."""

_DELIVERY_SLOTS = 3
"""What passes through without being updated needs no more to keep a lane busy."""


class Bucket(NamedTuple):
    """Elements `span` of those that a rank owns, and the optimizer's pieces in them, by number."""

    span: Span
    pieces: tuple[int, ...]


class Job(Protocol):
    """Work on buckets."""

    def __call__(self, bucket: Bucket, views: Views) -> Made:
        """Work on a bucket's fields on the device; what was made there and shall rest."""

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


class UnitStates:
    """One unit's fields off the device."""

    def __init__(self, name: str, policy: Policy, numel: int, offload: OffloadContext) -> None:
        self.name = name
        self.offload = offload
        self.holds_states = policy.trainable and policy.optim_tier != "device"
        self.is_updated = self.holds_states or (policy.trainable and _master_leaves(policy))
        self.numel = numel
        self._states_tier = policy.optim_tier
        self.storages: dict[str, StateStorage] = {}
        self.buckets: list[Bucket] = []
        self.job: Job | None = None
        self.is_hosted = False
        self.hosted: Hosting | None = None
        self._rested: Event = PAST
        self._buckets_rested: dict[Span, Event] = {}
        self._grads_rested: Event = PAST
        self._fetched: Event = PAST
        self._loaded: dict[Span, Views] = {}
        self._slots: dict[Span, PoolBuffer] = {}
        if _master_leaves(policy):
            kind = Kind.WEIGHTS if policy.weight_dtype == policy.master_dtype else Kind.OPTIM
            self.add(MASTER, policy.master_dtype, kind, policy.master_tier)
        if policy.trainable and policy.grads_tier != "device":
            self.add(GRADS, policy.accumulate_dtype, Kind.GRADS, policy.grads_tier)

    def add(self, field: str, dtype: torch.dtype, kind: Kind = Kind.OPTIM, tier: str | None = None) -> StateStorage:
        """Room for one more field, by default where the optimizer's states rest."""
        offload, tier = self.offload, tier or self._states_tier
        entry = Entry(kind, self.name if kind is not Kind.OPTIM else f"{self.name} ({field})", Tier(tier))
        if offload.staging is not None and tier == "disk":
            self.storages[field] = DiskStorage(offload.staging, offload.ledger, entry, self._cuts, dtype)
        else:
            self.storages[field] = HostStorage(offload.ledger, entry, self.numel, dtype, offload.host)
        return self.storages[field]

    def _cuts(self) -> list[Span]:
        return [bucket.span for bucket in self.buckets]

    def divide(self, pieces: Sequence[Span]) -> None:
        """Cut the elements into buckets, at the borders of the optimizer's pieces."""
        self.buckets = list(_buckets(self.numel, pieces, self.offload.bucket_numel))
        self.offload.expect(len(self.buckets))

    @property
    def everything(self) -> Span:
        """All elements."""
        return Span(0, self.numel)

    @property
    def is_on_disk(self) -> bool:
        """Whether a field rests on the disk."""
        return any(isinstance(storage, DiskStorage) for storage in self.storages.values())

    @property
    def size_bytes(self) -> int:
        """What rests here."""
        return sum(storage.size_bytes for storage in self.storages.values())

    @property
    def disk_bytes(self) -> int:
        """What of it rests on the disk."""
        return sum(storage.size_bytes for storage in self.storages.values() if isinstance(storage, DiskStorage))

    def leave_disk(self) -> None:
        """Let everything rest on the host from here on."""
        self.quiet()
        for field, storage in self.storages.items():
            if isinstance(storage, DiskStorage):
                self.storages[field] = storage.to_host(self.offload.host)
        self._states_tier = "host"

    def __contains__(self, field: str) -> bool:
        return field in self.storages

    @property
    def at_rest(self) -> tuple[Event, ...]:
        """When everything that was sent here has come, and everything that was asked for has been read."""
        return self._rested, self._grads_rested, self._fetched

    def fresh(self, dtype: torch.dtype) -> torch.Tensor:
        """Where new weights rest that were made on the host: the master, or where the gradients were."""
        if dtype == self.storages[MASTER].dtype:
            return self.on_host(MASTER)
        return self.on_host(GRADS).view(torch.uint8)[: self.numel * dtype.itemsize].view(dtype)

    def on_host(self, field: str) -> torch.Tensor:
        """The host memory that a field rests in."""
        storage = self.storages[field]
        assert isinstance(storage, HostStorage), f"{field} of {self.name} does not rest on the host"
        return storage.tensor

    def deliver(self, target: torch.Tensor | None) -> Delivery:
        """Do what is due, and bring the master to `target`, in its dtype. Whoever reads `target` waits for the arrival.

        It is memory of the computing stream's, whose earlier uses of it come first.
        """
        if self.hosted is not None:
            return self.hosted.deliver(target)
        job, self.job = self.job, None
        streams = self.offload.streams
        streams.update.wait(streams.now())
        if job or target is not None:
            with self._fetching(is_update=job is not None):
                for bucket in self.buckets:
                    self._carry(bucket, job, target if MASTER in self else None)
        return Arrival(streams, streams.update.mark(), job)

    def load(self, bucket: Bucket) -> None:
        """Bring a bucket's states up ahead of the job; its gradients may still be on their way down."""
        if bucket.span not in self._loaded:
            self._open(bucket)
            self._bring(bucket, [field for field in self.storages if field != GRADS])

    def rest(self, field: str, source: torch.Tensor, free: Callable[[], None]) -> None:
        """Take a whole field down from memory of the computing stream's, and `free` that when it is done."""
        streams = self.offload.streams
        streams.d2h.wait(streams.now(), self._rested, self._finish_hosted())
        with streams.d2h:
            self.storages[field].from_device(streams, self.everything, [(self.everything, source)])
        self._grads_rested = streams.d2h.mark()
        streams.free_after(self._grads_rested, free)

    def recall(self, field: str, target: torch.Tensor) -> Event:
        """Bring a whole field up to memory of the computing stream's."""
        streams = self.offload.streams
        streams.h2d.wait(streams.now(), self._rested, self._grads_rested)
        with streams.h2d:
            self.storages[field].to_device(streams, self.everything, target)
        self._fetched = streams.h2d.mark()
        return self._fetched

    def read(self, field: str, span: Span) -> torch.Tensor:
        """Values of a field as they rest, on the host, to look at."""
        self.quiet()
        return self.storages[field].read(span)

    def write(self, field: str, span: Span, values: torch.Tensor) -> None:
        """Replace values of a field where it rests."""
        self.quiet()
        self.storages[field].write(span, values)

    def quiet(self) -> None:
        """Do what is due, let go of what was loaded ahead, and have the host wait until all has come down."""
        self.flush()
        self.forget()
        for event in (self._finish_hosted(), *self.at_rest):
            event.synchronize()
        for storage in self.storages.values():
            storage.wait()

    def flush(self) -> None:
        """Do what is due now."""
        if self.job is not None or self.hosted is not None:
            self.deliver(None).wait()

    def forget(self) -> None:
        """Let go of what was loaded ahead: the fields may change where they rest."""
        streams, staging = self.offload.streams, self.offload.staging
        for bucket in self.buckets:
            if bucket.span in self._loaded:
                streams.update.wait(streams.h2d.mark())
                self._close(bucket, streams.update.mark())
        if staging is not None and self.is_on_disk:
            staging.drop()

    def free(self) -> None:
        """Give the room back. Waits for what is under way."""
        self.job = None
        self.forget()
        for event in (self._finish_hosted(), *self.at_rest):
            event.synchronize()
        for storage in self.storages.values():
            storage.free()
        self.storages.clear()

    def _finish_hosted(self) -> Event:
        """From here on, what was made on the host is no longer where the gradients are."""
        hosted, self.hosted = self.hosted, None
        return PAST if hosted is None else hosted.finish()

    @contextlib.contextmanager
    def _fetching(self, is_update: bool) -> Iterator[None]:
        """Within it, a delivery fetches what it needs from the disk."""
        delivery, staging = _FromDisk(self, is_update), self.offload.staging
        if staging is None or next(delivery.chunks(), None) is None:
            yield
            return
        staging.begin(delivery)
        try:
            yield
        finally:
            staging.end()

    def _carry(self, bucket: Bucket, job: Job | None, target: torch.Tensor | None) -> None:
        streams, span = self.offload.streams, bucket.span
        is_ahead = span in self._loaded
        if not is_ahead:
            self._open(bucket, None if job else _DELIVERY_SLOTS)
            self._bring(bucket, self.storages if job else [MASTER])
        elif job and GRADS in self:
            self._bring(bucket, [GRADS])
        views = self._loaded[span]
        streams.update.wait(self._fetched)
        with streams.update:
            made = job(bucket, views) if job else []
            if target is not None:
                target[span.slice].copy_(views[MASTER])
        if job is not None:
            self._take_down(bucket, views, made)
            self._close(bucket, self._rested)
        elif not is_ahead:
            self._close(bucket, streams.update.mark())

    def _take_down(self, bucket: Bucket, views: Views, made: Made) -> None:
        streams = self.offload.streams
        streams.d2h.wait(streams.update.mark())
        parts = {field: [(bucket.span, view)] for field, view in views.items() if field != GRADS}
        for field, span, values in made:
            parts.setdefault(field, []).append((span, values.view(-1)))
        with streams.d2h:
            for field, values_of in parts.items():
                self.storages[field].from_device(streams, bucket.span, values_of)
        self._rested = self._buckets_rested[bucket.span] = streams.d2h.mark()
        if made:
            # Made by the optimizer in the work lane, which knows nothing of the copy: they must live until it is done.
            self._rested.synchronize()

    def _close(self, bucket: Bucket, ready: Event) -> None:
        del self._loaded[bucket.span]
        self.offload.pool.give(self._slots.pop(bucket.span), ready)

    def _open(self, bucket: Bucket, most: int | None = None) -> None:
        """Take a slot, with room for everything the bucket may need."""
        numel = bucket.span.numel
        dtypes = {field: storage.dtype for field, storage in self.storages.items()}
        pool = self.offload.pool
        pool.fit(sum(room_bytes(numel, dtype) for dtype in dtypes.values()))
        self._slots[bucket.span] = slot = pool.take(most)
        self._loaded[bucket.span] = slot.cut(numel, dtypes)

    def _bring(self, bucket: Bucket, fields: Iterable[str]) -> None:
        streams, span = self.offload.streams, bucket.span
        # After this bucket's own way down, not that of the bucket before it: up and down run at once.
        streams.h2d.wait(self._slots[span].ready, self._buckets_rested.get(span, PAST), self._grads_rested)
        with streams.h2d:
            for field in fields:
                self.storages[field].to_device(streams, span, self._loaded[span][field])
        self._fetched = streams.h2d.mark()


@dataclass(frozen=True)
class _FromDisk:
    """A delivery as the staging sees it: all fields for an update, else the master alone."""

    states: UnitStates
    is_update: bool

    def chunks(self) -> Iterator[Chunk]:
        for bucket in self.states.buckets:
            for field in list(self.states.storages) if self.is_update else [MASTER]:
                storage = self.states.storages.get(field)
                if isinstance(storage, DiskStorage):
                    yield from storage.chunks_in(bucket.span)


@dataclass
class Arrival:
    """A delivery under way; a handle as those of `comm` are."""

    streams: Streams
    event: Event
    job: Job | None

    def issue(self) -> None:
        pass

    def wait(self) -> None:
        self.streams.wait(self.event)
        if self.job is not None:
            self.job.done()
        self.job = None


def unit_states_for(name: str, policy: Policy, numel: int, offload: OffloadContext) -> UnitStates | None:
    """A states for a unit of which something rests off the device."""
    leaves = policy.trainable and (policy.optim_tier != "device" or policy.grads_tier != "device")
    return UnitStates(name, policy, numel, offload) if leaves or _master_leaves(policy) else None


def _master_leaves(policy: Policy) -> bool:
    return policy.master_tier != "device"


def _buckets(numel: int, pieces: Sequence[Span], most: int) -> Iterator[Bucket]:
    """Consecutive pieces together, up to `most` elements; without pieces, runs of so many. All elements are in one."""
    spans = pieces or [Span(start, min(start + most, numel)) for start in range(0, numel, most)]
    start, taken = 0, 0
    for index, span in enumerate(spans):
        if index > taken and span.stop - start > most:
            yield Bucket(Span(start, span.start), tuple(range(taken, index)) if pieces else ())
            start, taken = span.start, index
    if numel:
        yield Bucket(Span(start, numel), tuple(range(taken, len(pieces))))
