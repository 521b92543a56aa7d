"""Where a unit's states rest, as its weights, gradients and optimizer see it, and the buckets in which they travel.

- *state*: one value for each element that this rank owns: the `master`, each moment of the optimizer (under the
  optimizer's own key), the reduced `grads`.
- *bucket*: a run of a unit's elements whose states travel together, side by side in one buffer of the pool.
- *pending update*: the optimizer's work on the buckets of a unit while they are on the device.

    ResidentStates   all states rest on the device: nothing travels, every method is trivial
    OffloadedStates  some state rests on the host or on a disk, see `offloaded_states`
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardwise.offload.streams import Event, Stream, Streams
from shardwise.partition import Span
from shardwise.partition.layout import GroupRun

MASTER, GRADS = "master", "grads"
"""States by key; all others are the optimizer's moments."""

Views = dict[str, torch.Tensor]
NewMoments = list[tuple[str, Span, torch.Tensor]]
"""Moments that the optimizer allocated on the device in its first step, with their keys and elements."""


class Bucket(NamedTuple):
    """Elements `span` of those that a rank owns, and the numbers of the master pieces in them."""

    span: Span
    pieces: tuple[int, ...]


class BucketUpdate(Protocol):
    """A pending update of one unit."""

    needs_room: bool
    """Whether it needs room for gradients in fp32."""

    def __call__(self, bucket: Bucket, views: Views, room: torch.Tensor | None) -> NewMoments:
        """Update a bucket's states on the device; returns the moments that were allocated there and are to rest."""

    def done(self) -> None:
        """The compute stream has been ordered after the update: free what it read."""


class Arrival(Protocol):
    """Values that are being copied to the device; a handle like those of `comm`."""

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Within it, work is issued to a stream that is ordered after the arrival."""

    def wait(self) -> None:
        """Order the compute stream after the arrival."""


class _Here:
    """An arrival of values that are on the device: what is issued to the compute stream follows them."""

    def following(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait(self) -> None:
        pass


HERE: Arrival = _Here()


@dataclass
class DeviceArrival:
    """A transfer that ends on `stream`."""

    streams: Streams
    stream: Stream
    event: Event
    update: BucketUpdate | None

    def following(self) -> contextlib.AbstractContextManager[None]:
        return self.stream

    def wait(self) -> None:
        self.streams.wait(self.event)
        if self.update is not None:
            self.update.done()
        self.update = None


def buckets_of(numel: int, pieces: Sequence[Span], most: int) -> Iterator[Bucket]:
    """Buckets that cover all elements: consecutive pieces, up to `most` elements; without pieces, runs of `most`."""
    spans = pieces or list(Span(0, numel).split(most))
    start, taken = 0, 0
    for index, span in enumerate(spans):
        if index > taken and span.stop - start > most:
            yield Bucket(Span(start, span.start), tuple(range(taken, index)) if pieces else ())
            start, taken = span.start, index
    if numel:
        yield Bucket(Span(start, numel), tuple(range(taken, len(pieces))))


class UnitStates(ABC):
    """Where one unit's states rest."""

    is_offloaded: bool
    holds_moments = False
    """Whether the optimizer's moments rest off the device."""
    is_streamed = False
    """Whether the update is made while the states travel, instead of where the weights are."""
    updates_on_host = False
    """Whether the host makes the update, from the next step on."""
    pending: BucketUpdate | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that rest off the device."""
        return 0

    @property
    def disk_bytes(self) -> int:
        """How many of them rest on a disk."""
        return 0

    @abstractmethod
    def __contains__(self, state: str) -> bool:
        """Whether a state rests off the device."""

    @abstractmethod
    def split(self, runs: Sequence[GroupRun]) -> Sequence[GroupRun]:
        """The runs of the optimizer's elements, cut so that each travels at once."""

    @abstractmethod
    def run_update(self) -> None:
        """Issue the pending update now, and order the compute stream after it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every state is where it rests."""

    @abstractmethod
    def free(self) -> None:
        """Free the storages, after all that is in flight."""


class ResidentStates(UnitStates):
    """All states rest on the device."""

    is_offloaded = False

    def __contains__(self, state: str) -> bool:
        return False

    def split(self, runs: Sequence[GroupRun]) -> Sequence[GroupRun]:
        return runs

    def run_update(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        pass
