"""What a field of a unit rests in: a storage, one value for each element that this rank owns, on one tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.offload.streams import Streams
from shardwise.partition.layout import Span

Parts = Sequence[tuple[Span, torch.Tensor]]
"""FlatGrads values and the elements they are of; later ones count where they overlap."""


class StateStorage(Protocol):
    """Room for one field, zeros at first. Who calls has waited for what is under way; see `UnitStates.quiet`."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def size_bytes(self) -> int:
        """What the values take."""

    def at_rest(self, span: Span, shape: torch.Size) -> torch.Tensor:
        """What stands for the values of `span` in the optimizer while they rest: themselves, or a stand-in."""

    def read(self, span: Span) -> torch.Tensor:
        """The values of `span` in host memory, to look at."""

    def write(self, span: Span, values: torch.Tensor) -> None:
        """Replace the values of `span`."""

    def bring(self, streams: Streams, span: Span, target: torch.Tensor) -> None:
        """Copy the values of a bucket to the device, in the lane that is current."""

    def take(self, streams: Streams, span: Span, parts: Parts) -> None:
        """Replace values of a bucket with what is on the device, in the lane that is current."""

    def wait(self) -> None:
        """Have the host wait until what left the device is where it rests."""

    def free(self) -> None:
        """Give the room back."""
