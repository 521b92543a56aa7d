"""This rank's shard of the reduced gradients: where a reduce-scatter adds its mean, and where it rests meanwhile.

SegmentShard    a segment of the unit's full gradients, where gradients are replicated
HeldShard       a buffer of its own on the device, to which later micro-batches add
OffloadedShard  host memory; copied there when it is made, and back to the device to add the next micro-batch
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from shardwise.comm import Comm
from shardwise.memory import Buffer
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.offload.streams import Event
from shardwise.offload.unit_states import GRADS
from shardwise.partition import Span
from shardwise.unit import norm


class ReducedShard(ABC):
    """One unit's reduced shard; `counted` is what the norm over all ranks has of it (see `Layout.counted`)."""

    is_offloaded = False

    def __init__(self, counted: Sequence[Span]) -> None:
        self._counted = counted

    @property
    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The values; a fresh copy where they rest on the host."""

    @abstractmethod
    def target(self) -> tuple[torch.Tensor, bool]:
        """Where the mean of a micro-batch goes, and whether it is added to what is there."""

    def prefetch(self) -> None:
        """Gradients of the next micro-batch are about to arrive."""

    def store(self) -> None:
        """The target holds the new sum."""

    def edit(self, change: Callable[[torch.Tensor], None]) -> None:
        """Call `change` on the values, which it may write to."""
        change(self.tensor)

    def sum_of_squares(self, comm: Comm) -> torch.Tensor:
        """The sum of squares of the counted values: fp64, on the device."""
        return norm.sum_of_squares(self.counted_in(self.tensor), comm)

    def counted_in(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The counted parts of the shard's `values`."""
        if len(self._counted) == 1 and self._counted[0].numel == values.numel():
            return [values]
        return [values[span.slice] for span in self._counted]

    def forget(self) -> None:
        """The update has the values, or will read them: the next micro-batch starts anew."""

    def free(self) -> None:
        """Free the memory, after all that is in flight."""


class SegmentShard(ReducedShard):
    """A segment of the full gradients, which is freed with them."""

    def __init__(self, segment: torch.Tensor, counted: Sequence[Span]) -> None:
        super().__init__(counted)
        self._segment = segment

    @property
    def tensor(self) -> torch.Tensor:
        return self._segment

    def target(self) -> tuple[torch.Tensor, bool]:
        return self._segment, False


class HeldShard(ReducedShard):
    """A buffer on the device."""

    def __init__(self, buffer: Buffer, counted: Sequence[Span]) -> None:
        super().__init__(counted)
        self._buffer = buffer

    @property
    def tensor(self) -> torch.Tensor:
        return self._buffer.tensor

    def target(self) -> tuple[torch.Tensor, bool]:
        if self._buffer.live:
            return self._buffer.tensor, True
        return self._buffer.allocate(), False

    def free(self) -> None:
        self._buffer.free()


class OffloadedShard(HeldShard):
    """A shard that rests on the host. Its part of the global norm stays on the device."""

    is_offloaded = True

    def __init__(self, buffer: Buffer, counted: Sequence[Span], states: OffloadedStates, comm: Comm) -> None:
        super().__init__(buffer, counted)
        self._states = states
        self._comm = comm
        self._sum: torch.Tensor | None = None
        self._fetching: Event | None = None

    @property
    def tensor(self) -> torch.Tensor:
        copy = torch.empty_like(self._buffer.tensor)
        self._states.streams.wait(self._states.fetch(GRADS, copy))
        return copy

    def prefetch(self) -> None:
        """Copy the sum of earlier micro-batches back, ahead of what is added to it."""
        if self._sum is not None and self._fetching is None:
            # The buffer may still be the source of its last copy to the host: wait for that, and free it, before it is
            # allocated again.
            self._states.streams.drain()
            self._fetching = self._states.fetch(GRADS, self._buffer.allocate())

    def target(self) -> tuple[torch.Tensor, bool]:
        self.prefetch()
        self._wait_fetched()
        return super().target()

    def store(self) -> None:
        self._sum = norm.sum_of_squares(self.counted_in(self._buffer.tensor), self._comm)
        self._states.offload(GRADS, self._buffer.tensor, self._buffer.free)

    def edit(self, change: Callable[[torch.Tensor], None]) -> None:
        shard = self.tensor
        change(shard)
        self._sum = norm.sum_of_squares(self.counted_in(shard), self._comm)
        keep = [shard]  # alive until the copy is over
        self._states.offload(GRADS, shard, keep.clear)

    def sum_of_squares(self, comm: Comm) -> torch.Tensor:
        assert self._sum is not None, "no gradients were reduced"
        return self._sum

    def forget(self) -> None:
        self._sum = None

    def free(self) -> None:
        self._wait_fetched()
        self._states.streams.drain()
        super().free()

    def _wait_fetched(self) -> None:
        if self._fetching is not None:
            self._states.streams.wait(self._fetching)
            self._fetching = None
