"""What a rank holds of a unit that lasts: master values and optimizer state, wherever they rest.

Whoever saves, loads or copies states goes through here and sees no tiers: a `StateView` names values over a run of the
unit's flat buffer and reads or writes any part of them. Values that are not one per element (Adam's `step`, a matrix
optimizer's rows and columns) are *extras*, the same on every rank that holds some of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.offload import unit_states
from shardwise.offload.unit_states import UnitStates
from shardwise.optim.streamed_update import adopt
from shardwise.partition.layout import Span
from shardwise.unit.unit import Unit

MASTER = "param"
"""The key of the values themselves; those of optimizer state are `optim/` and the optimizer's own word."""


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
    at: UnitStates
    field: str
    first: int

    @property
    def dtype(self) -> torch.dtype:
        return self.at.storages[self.field].dtype

    def read(self, part: Span) -> torch.Tensor:
        return self.at.read(self.field, part.shift(-self.first))

    def write(self, part: Span, values: torch.Tensor) -> None:
        with torch.no_grad():
            self.at.write(self.field, part.shift(-self.first), values)


@dataclass(frozen=True)
class Extra:
    """A value that is not one per element, of all parameters in `span`."""

    key: str
    span: Span
    value: Any


def state_views(unit: Unit, optimizer: torch.optim.Optimizer | None) -> list[StateView]:
    """All values of a unit that this rank holds one per element: its master first, and nothing else without an
    optimizer."""
    unit.quiet()
    weights, first = unit.weights, unit.weights.owned.start
    values: list[StateView] = []
    if weights.master_states is not None:
        values.append(OffloadedView(MASTER, weights.owned, weights.master_states, unit_states.MASTER, first))
    else:
        values.append(TensorView(MASTER, weights.owned, weights.master))
    for piece, span, state in _states(unit, optimizer):
        for key, value in state.items():
            if not _is_per_element(value, piece):
                continue
            if unit.states is not None and unit.states.holds_states:
                values.append(OffloadedView(f"optim/{key}", span, unit.states, key, first))
            else:
                values.append(TensorView(f"optim/{key}", span, value.detach().view(-1)))
    return values + unit.kept if optimizer is not None else values


def extras_of(unit: Unit, optimizer: torch.optim.Optimizer | None) -> list[Extra]:
    """All optimizer state of a unit on this rank that is not one per element."""
    return [
        Extra(key, span, value)
        for piece, span, state in _states(unit, optimizer)
        for key, value in state.items()
        if not _is_per_element(value, piece)
    ]


def prepare(unit: Unit, optimizer: torch.optim.Optimizer, span: Span, dtypes: Mapping[str, torch.dtype]) -> None:
    """Make room for the state of the piece at `span`, zeros, as the optimizer's first step would; drop what it had."""
    for piece, where, state in _states(unit, optimizer, missing=True):
        if where == span:
            state.clear()
            state.update({key: torch.zeros_like(piece, dtype=dtype) for key, dtype in dtypes.items()})
    adopt(optimizer, unit)


def set_extra(unit: Unit, optimizer: torch.optim.Optimizer, span: Span, key: str, value: Any) -> None:
    """Give the piece at `span` a value that is not one per element, where the optimizer's kernel expects it."""
    for (number, _), (_, where, state) in zip(unit.weights.pieces, _states(unit, optimizer, True), strict=True):
        if where == span:
            group = optimizer.param_groups[number]
            on_device = group.get("fused") or group.get("capturable") or getattr(value, "ndim", 0)
            state[key] = value.to(unit.comm.device) if on_device and isinstance(value, torch.Tensor) else value


def piece_spans(unit: Unit) -> list[Span]:
    """Where the optimizer's pieces of a unit lie in its flat buffer."""
    return [span.shift(unit.weights.owned.start) for span in unit.weights.piece_spans]


def _states(
    unit: Unit, optimizer: torch.optim.Optimizer | None, missing: bool = False
) -> list[tuple[torch.Tensor, Span, dict[str, Any]]]:
    if optimizer is None:
        return []
    unit.quiet()
    pairs = zip(unit.weights.pieces, piece_spans(unit), strict=True)
    return [(piece, span, optimizer.state[piece]) for (_, piece), span in pairs if missing or piece in optimizer.state]


def _is_per_element(value: Any, piece: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == piece.shape
