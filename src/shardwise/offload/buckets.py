"""Buckets: runs of a unit's elements whose states travel together, what updates them, and their arrival.

- *state*: one value for each element that this rank owns: the `master`, each moment of the optimizer (under the
  optimizer's own key), the reduced `grads`.
- *bucket*: a run of a unit's elements whose states travel together, side by side in one buffer of the pool.
- *pending update*: the optimizer's work on the buckets of a unit while they are on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardwise.offload.streams import Event, Stream, Streams
from shardwise.partition import Span

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
    spans = pieces or [Span(start, min(start + most, numel)) for start in range(0, numel, most)]
    start, taken = 0, 0
    for index, span in enumerate(spans):
        if index > taken and span.stop - start > most:
            yield Bucket(Span(start, span.start), tuple(range(taken, index)) if pieces else ())
            start, taken = span.start, index
    if numel:
        yield Bucket(Span(start, numel), tuple(range(taken, len(pieces))))
