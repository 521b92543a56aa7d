"""Values of a unit that last, seen without their tier: the master, the optimizer's moments, an average.

Code that saves, loads or copies states works on views: a view names values over a run of the unit's flat buffer and
reads or writes any part of them, wherever they rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.partition import Span


class StateView(Protocol):
    """Values of one key over `span` of the unit's flat buffer."""

    @property
    def key(self) -> str: ...

    @property
    def span(self) -> Span: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, part: Span) -> torch.Tensor:
        """The values over `part` of the flat buffer, flat, on any device; valid until the next update."""

    def write(self, part: Span, values: torch.Tensor) -> None:
        """Replace the values over `part` of the flat buffer; `values` may be of another dtype and device."""


@dataclass(frozen=True)
class TensorView:
    """Values that are a tensor."""

    key: str
    span: Span
    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, part: Span) -> torch.Tensor:
        return self.tensor[part.shift(-self.span.start).slice]

    def write(self, part: Span, values: torch.Tensor) -> None:
        with torch.no_grad():
            self.tensor[part.shift(-self.span.start).slice].copy_(values)


@dataclass(frozen=True)
class OffloadedView:
    """Values of a state that rests off the device; `first` is its first element in the flat buffer."""

    key: str
    span: Span
    states: OffloadedStates
    state: str
    first: int

    @property
    def dtype(self) -> torch.dtype:
        return self.states.storages[self.state].dtype

    def read(self, part: Span) -> torch.Tensor:
        return self.states.read(self.state, part.shift(-self.first))

    def write(self, part: Span, values: torch.Tensor) -> None:
        with torch.no_grad():
            self.states.write(self.state, part.shift(-self.first), values)
