"""A unit's states off the device, and how they travel to it and back.

A state rests in a storage on its tier (see `storage`), and travels in buckets (see `unit_states`). A pending update is
issued with the unit's next transfer, or earlier by `run_update`. A bucket is copied to the device on the `h2d` stream,
updated on the `update` stream, and copied back on `d2h`; see `streams`. Everything is issued without waiting; events
order the streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.memory import Entry, Kind, Tier
from shardwise.offload.context import OffloadContext, PoolBuffer, room_bytes
from shardwise.offload.pinned import Chunk
from shardwise.offload.storage import DiskStorage, HostStorage, StateStorage
from shardwise.offload.streams import PAST, Event
from shardwise.offload.unit_states import (
    GRADS,
    MASTER,
    Arrival,
    Bucket,
    BucketUpdate,
    DeviceArrival,
    NewMoments,
    ResidentStates,
    UnitStates,
    Views,
    buckets_of,
)
from shardwise.offload.weight_files import FileStorage
from shardwise.partition import Policy, Span
from shardwise.partition.layout import GroupRun
from shardwise.tensors import outside_inference

TRANSFER_BUFFERS = 3
"""Buffers for a transfer without an update: three keep the h2d stream busy."""


class PendingHostUpdate(Protocol):
    """A pending update that is made on the host, see `optim.host_update`."""

    def transfer(self, target: torch.Tensor | None) -> Arrival:
        """Copy the new weights to `target`."""

    def finish(self) -> Event:
        """Block the host until the update is made; returns when the last transfer has read the result."""


class OffloadedStates(UnitStates):
    """One unit's states off the device."""

    is_offloaded = True

    def __init__(self, name: str, policy: Policy, numel: int, offload: OffloadContext) -> None:
        self.name = name
        self.numel = numel
        self.streams = offload.streams
        self.storages: dict[str, StateStorage] = {}
        self.buckets: list[Bucket] = []
        self.holds_moments = policy.trainable and policy.optim_tier != "device"
        self.is_streamed = self.holds_moments or (policy.trainable and policy.master_tier != "device")
        self.host_update: PendingHostUpdate | None = None
        self._is_frozen = not policy.trainable
        self._offload = offload
        self._moments_tier = policy.optim_tier
        self._stored: Event = PAST
        self._buckets_stored: dict[Span, Event] = {}
        self._grads_stored: Event = PAST
        self._fetched: Event = PAST
        self._on_device: dict[Span, tuple[PoolBuffer, Views]] = {}
        self._makes_moments = self.holds_moments
        if policy.master_tier != "device":
            kind = Kind.WEIGHTS if policy.weight_dtype == policy.master_dtype else Kind.OPTIM
            self._add(MASTER, policy.master_dtype, kind, policy.master_tier)
        if policy.trainable and policy.grads_tier != "device":
            self._add(GRADS, policy.accumulate_dtype, Kind.GRADS, policy.grads_tier)

    def __contains__(self, state: str) -> bool:
        return state in self.storages

    def moment(self, key: str, dtype: torch.dtype) -> StateStorage:
        """The storage of a moment, allocated when it is first asked for."""
        return self.storages[key] if key in self.storages else self._add(key, dtype, Kind.OPTIM, self._moments_tier)

    def _add(self, state: str, dtype: torch.dtype, kind: Kind, tier: str) -> StateStorage:
        offload = self._offload
        entry = Entry(kind, self.name if kind is not Kind.OPTIM else f"{self.name} ({state})", Tier(tier))
        if offload.weight_files is not None and tier == "disk":
            self.storages[state] = FileStorage(offload.weight_files, offload.ledger, entry, self.numel, dtype)
        elif offload.staging is not None and tier == "disk":
            self.storages[state] = DiskStorage(offload.staging, offload.ledger, entry, self._cuts, dtype)
        else:
            self.storages[state] = HostStorage(offload.ledger, entry, self.numel, dtype, offload.host)
        return self.storages[state]

    def _cuts(self) -> list[Span]:
        return [bucket.span for bucket in self.buckets]

    def split(self, runs: Sequence[GroupRun]) -> Sequence[GroupRun]:
        """Also cuts the elements into buckets, at the borders of the runs."""
        most = self._offload.bucket_numel
        cut = [part for run in runs for part in run.split(most)]
        self.buckets = list(buckets_of(self.numel, [part.shard for part in cut], most))
        self._offload.expect(len(self.buckets))
        return cut

    @property
    def everything(self) -> Span:
        """All elements."""
        return Span(0, self.numel)

    @property
    def is_on_disk(self) -> bool:
        """Whether a state rests on a disk."""
        return any(isinstance(storage, DiskStorage) for storage in self.storages.values())

    @property
    def can_update_on_host(self) -> bool:
        """Whether everything that an update reads and writes rests off the device."""
        return self.holds_moments and MASTER in self and GRADS in self

    @property
    def size_bytes(self) -> int:
        return sum(storage.size_bytes for storage in self.storages.values())

    @property
    def disk_bytes(self) -> int:
        return sum(storage.size_bytes for storage in self.storages.values() if isinstance(storage, DiskStorage))

    def leave_disk(self) -> None:
        """Move what rests on a disk to the host."""
        self.synchronize()
        for state, storage in self.storages.items():
            if isinstance(storage, DiskStorage):
                self.storages[state] = storage.to_host(self._offload.host)
        self._moments_tier = "host"

    @property
    def in_flight(self) -> tuple[Event, ...]:
        """The ends of all copies to and from the storages that were issued so far."""
        return self._stored, self._grads_stored, self._fetched

    def on_host(self, state: str) -> torch.Tensor:
        """The host memory of a state."""
        storage = self.storages[state]
        assert isinstance(storage, HostStorage), f"{state} of {self.name} does not rest on the host"
        return storage.tensor

    def new_weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for new weights that the host makes: the master's, or that of the gradients it has used."""
        if dtype == self.storages[MASTER].dtype:
            return self.on_host(MASTER)
        return self.on_host(GRADS).view(torch.uint8)[: self.numel * dtype.itemsize].view(dtype)

    # Between the storages and the device

    @outside_inference()
    def transfer(self, target: torch.Tensor | None) -> Arrival:
        """Issue the pending update, and copy the master to `target`, in its dtype; readers of it wait for the arrival.

        `target` is memory of the compute stream: the update stream is ordered after what that stream did so far, so
        that earlier readers of `target` are done (tests/test_offload_gpu.py with poisoned buffers).
        """
        if self.host_update is not None:
            return self.host_update.transfer(target)
        update, self.pending = self.pending, None
        if update is None and target is not None and self._travels_directly(target):
            return DeviceArrival(self.streams, self.streams.h2d, self.fetch(MASTER, target), None)
        self.streams.update.wait(self.streams.now())
        if update or target is not None:
            with self._reading_disk(is_update=update is not None):
                for bucket in self.buckets:
                    self._carry(bucket, update, target if MASTER in self else None)
            self._makes_moments = self._makes_moments and update is None
        return DeviceArrival(self.streams, self.streams.update, self.streams.update.mark(), update)

    def _travels_directly(self, target: torch.Tensor) -> bool:
        """Whether the master is copied to `target` as it rests: it is never updated, and nothing has to be cast."""
        storage = self.storages.get(MASTER)
        return self._is_frozen and storage is not None and storage.travels_directly and storage.dtype == target.dtype

    def prefetch(self, bucket: Bucket) -> None:
        """Copy a bucket's states to the device ahead of the update, without gradients: they may not be there yet."""
        if bucket.span not in self._on_device:
            self._acquire(bucket)
            self._fetch(bucket, [state for state in self.storages if state != GRADS])

    def offload(self, state: str, source: torch.Tensor, free: Callable[[], None]) -> None:
        """Copy a whole state from memory of the compute stream to where it rests; `free` is called once that memory may
        be reused."""
        streams = self.streams
        # `source` was written on the compute stream. The storage may be in use: by the last store, and where the host
        # updates, its gradients hold the new weights until those are copied (`new_weights`; tests/test_offload_gpu.py).
        streams.d2h.wait(streams.now(), self._stored, self._finish_host_update())
        with streams.d2h:
            self.storages[state].from_device(streams, self.everything, [(self.everything, source)])
        self._grads_stored = streams.d2h.mark()
        streams.free_after(self._grads_stored, free)

    def fetch(self, state: str, target: torch.Tensor) -> Event:
        """Copy a whole state to memory of the compute stream."""
        streams = self.streams
        # After earlier readers of `target` on the compute stream, and after the stores that this reads.
        streams.h2d.wait(streams.now(), self._stored, self._grads_stored)
        with streams.h2d:
            self.storages[state].to_device(streams, self.everything, target)
        self._fetched = streams.h2d.mark()
        return self._fetched

    def read(self, state: str, span: Span) -> torch.Tensor:
        """Values of a state as they rest, in host memory."""
        self.synchronize()
        return self.storages[state].read(span)

    def write(self, state: str, span: Span, values: torch.Tensor) -> None:
        """Replace values of a state where it rests."""
        self.synchronize()
        self.storages[state].write(span, values)

    def synchronize(self) -> None:
        self.run_update()
        self._wait_copies()
        for storage in self.storages.values():
            storage.wait()

    def run_update(self) -> None:
        if self.pending is not None or self.host_update is not None:
            self.transfer(None).wait()

    def drop_prefetched(self) -> None:
        """Give up buckets that were fetched ahead: the states may change where they rest."""
        streams, staging = self.streams, self._offload.staging
        for bucket in self.buckets:
            if bucket.span in self._on_device:
                streams.update.wait(streams.h2d.mark())
                self._give_back(bucket, streams.update.mark())
        if staging is not None and self.is_on_disk:
            staging.drop()

    def free(self) -> None:
        self.pending = None
        self._wait_copies()
        for storage in self.storages.values():
            storage.free()
        self.storages.clear()

    def _wait_copies(self) -> None:
        self.drop_prefetched()
        for event in (self._finish_host_update(), *self.in_flight):
            event.synchronize()

    def _finish_host_update(self) -> Event:
        """Afterwards the memory of the gradients no longer holds new weights."""
        made, self.host_update = self.host_update, None
        return PAST if made is None else made.finish()

    @contextlib.contextmanager
    def _reading_disk(self, is_update: bool) -> Iterator[None]:
        """Within it, a transfer fetches what it needs from the disk."""
        reads, staging = _TransferReads(self, is_update), self._offload.staging
        if staging is None or next(reads.chunks(), None) is None:
            yield
            return
        staging.begin(reads)
        try:
            yield
        finally:
            staging.end()

    def _carry(self, bucket: Bucket, update: BucketUpdate | None, target: torch.Tensor | None) -> None:
        streams, span = self.streams, bucket.span
        was_prefetched = span in self._on_device
        if not was_prefetched:
            self._acquire(bucket, None if update else TRANSFER_BUFFERS)
            self._fetch(bucket, self.storages if update else [MASTER])
        elif update and GRADS in self:
            self._fetch(bucket, [GRADS])
        views = self._on_device[span][1]
        streams.update.wait(self._fetched)
        room = self._offload.pool.scratch(span.numel) if update and update.needs_room else None
        with self._updating():
            made = update(bucket, views, room) if update else []
            if target is not None:
                target[span.slice].copy_(views[MASTER])
        if update is not None:
            self._store(bucket, views, made)
            self._give_back(bucket, self._stored)
        elif not was_prefetched:
            self._give_back(bucket, streams.update.mark())

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Within it, work is issued to the update stream.

        In its first step the optimizer allocates its moments, and the update is issued to the compute stream instead:
        so the update stream never allocates, see `DeviceBufferPool.scratch`.
        """
        streams = self.streams
        if not self._makes_moments:
            with streams.update:
                yield
            return
        streams.wait(streams.update.mark())
        yield
        streams.update.wait(streams.now())

    def _store(self, bucket: Bucket, views: Views, made: NewMoments) -> None:
        streams = self.streams
        streams.d2h.wait(streams.update.mark())
        parts = {state: [(bucket.span, view)] for state, view in views.items() if state != GRADS}
        for state, span, values in made:
            parts.setdefault(state, []).append((span, values.view(-1)))
        with streams.d2h:
            for state, values_of in parts.items():
                self.storages[state].from_device(streams, bucket.span, values_of)
        self._stored = self._buckets_stored[bucket.span] = streams.d2h.mark()
        if made:
            # The allocator does not know that d2h still reads them: the host keeps them alive until it is over. Only
            # the first step makes any.
            self._stored.synchronize()

    def _acquire(self, bucket: Bucket, most: int | None = None) -> None:
        """Take a buffer of the pool with room for all states of the bucket."""
        numel, pool = bucket.span.numel, self._offload.pool
        dtypes = {state: storage.dtype for state, storage in self.storages.items()}
        pool.fit(sum(room_bytes(numel, dtype) for dtype in dtypes.values()))
        buffer = pool.take(most)
        self._on_device[bucket.span] = buffer, buffer.cut(numel, dtypes)

    def _give_back(self, bucket: Bucket, ready: Event) -> None:
        buffer, _ = self._on_device.pop(bucket.span)
        self._offload.pool.give(buffer, ready)

    def _fetch(self, bucket: Bucket, states: Iterable[str]) -> None:
        streams, span = self.streams, bucket.span
        buffer, views = self._on_device[span]
        # Ordered after the last store of this bucket alone, not of the previous one: h2d and d2h run at the same time.
        streams.h2d.wait(buffer.ready, self._buckets_stored.get(span, PAST), self._grads_stored)
        with streams.h2d:
            for state in states:
                self.storages[state].to_device(streams, span, views[state])
        self._fetched = streams.h2d.mark()


@dataclass(frozen=True)
class _TransferReads:
    """What a transfer reads from the disk: all states for an update, else the master alone."""

    states: OffloadedStates
    is_update: bool

    def chunks(self) -> Iterator[Chunk]:
        for bucket in self.states.buckets:
            for state in list(self.states.storages) if self.is_update else [MASTER]:
                storage = self.states.storages.get(state)
                if isinstance(storage, DiskStorage):
                    yield from storage.chunks_in(bucket.span)


def unit_states_for(name: str, policy: Policy, numel: int, offload: OffloadContext) -> UnitStates:
    """Where the states of a unit rest, of which this rank owns `numel` elements."""
    leaves = policy.trainable and (policy.optim_tier != "device" or policy.grads_tier != "device")
    if leaves or policy.master_tier != "device":
        return OffloadedStates(name, policy, numel, offload)
    return ResidentStates()


def prefetch(offload: OffloadContext, units: Iterable[OffloadedStates], progress: float) -> None:
    """Fetch the states of the units that are updated first, while the h2d stream is idle; see `prefetch_limit`."""
    limit = offload.prefetch_limit(progress)
    for states in units:
        for bucket in states.buckets:
            if offload.pool.out >= limit or states.is_on_disk:  # the staging itself reads ahead from the disk
                return
            states.prefetch(bucket)
