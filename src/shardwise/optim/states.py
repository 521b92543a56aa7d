"""The states of a unit that last: its master and the optimizer's, as views that hide the tier (see `state_view`).

State that is not one value per element (Adam's `step`, a matrix optimizer's rows and columns) is *extra*: it is the
same on every rank that holds some of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.offload.unit_states import MASTER
from shardwise.partition import Span
from shardwise.unit import Unit
from shardwise.unit.state_view import OffloadedView, StateView, TensorView

PARAM = "param"
"""The key of the master's values; those of optimizer state are `optim/` and the optimizer's own key."""


@dataclass(frozen=True)
class Extra:
    """A value that is not one per element, of all parameters in `span`."""

    key: str
    span: Span
    value: Any


def per_element(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[str]:
    """The keys of a piece's state that have a value for each of its elements."""
    return [key for key, value in optimizer.state.get(param, {}).items() if _is_per_element(value, param)]


def _is_per_element(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == param.shape


def state_views(unit: Unit, optimizer: torch.optim.Optimizer | None) -> list[StateView]:
    """All values of a unit that this rank has one per element: its master first, and nothing else without an
    optimizer."""
    unit.synchronize()
    weights, states, first = unit.weights, unit.states, unit.weights.owned.start
    views: list[StateView] = []
    if isinstance(states, OffloadedStates) and MASTER in states:
        views.append(OffloadedView(PARAM, weights.owned, states, MASTER, first))
    else:
        views.append(TensorView(PARAM, weights.owned, weights.master))
    for param, span, state in _piece_states(unit, optimizer):
        for key, value in state.items():
            if not _is_per_element(value, param):
                continue
            if isinstance(states, OffloadedStates) and states.holds_moments:
                views.append(OffloadedView(f"optim/{key}", span, states, key, first))
            else:
                views.append(TensorView(f"optim/{key}", span, value.detach().view(-1)))
    return views + unit.averages if optimizer is not None else views


def extras_of(unit: Unit, optimizer: torch.optim.Optimizer | None) -> list[Extra]:
    """All optimizer state of a unit on this rank that is not one per element."""
    return [
        Extra(key, span, value)
        for param, span, state in _piece_states(unit, optimizer)
        for key, value in state.items()
        if not _is_per_element(value, param)
    ]


def prepare(unit: Unit, optimizer: torch.optim.Optimizer, span: Span, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the piece at `span` state of zeros, as the optimizer's first step would, in place of what it had."""
    for param, where, state in _piece_states(unit, optimizer, missing=True):
        if where == span:
            state.clear()
            state.update({key: torch.zeros_like(param, dtype=dtype) for key, dtype in dtypes.items()})
    offload_moments(optimizer, unit)


def set_extra(unit: Unit, optimizer: torch.optim.Optimizer, span: Span, key: str, value: Any) -> None:
    """Give the piece at `span` a value that is not one per element, where the optimizer's kernel expects it."""
    for piece, (_, where, state) in zip(unit.weights.pieces, _piece_states(unit, optimizer, True), strict=True):
        if where == span:
            group = optimizer.param_groups[piece.group]
            on_device = group.get("fused") or group.get("capturable") or getattr(value, "ndim", 0)
            state[key] = value.to(unit.comm.device) if on_device and isinstance(value, torch.Tensor) else value


def piece_spans(unit: Unit) -> list[Span]:
    """Where the optimizer's pieces of a unit lie in its flat buffer."""
    return [piece.span.shift(unit.weights.owned.start) for piece in unit.weights.pieces]


def offload_moments(optimizer: torch.optim.Optimizer, unit: Unit) -> None:
    """Move per-element state that was put into the optimizer (made before the engine, or loaded) to where it rests."""
    states = unit.states
    if not isinstance(states, OffloadedStates) or not states.holds_moments:
        return
    for piece in unit.weights.pieces:
        for key in per_element(optimizer, piece.param):
            value = optimizer.state[piece.param][key]
            resting = states.moment(key, value.dtype).at_rest(piece.span, value.shape)
            if not shares_storage(value, resting):
                states.write(key, piece.span, value.reshape(-1))
                optimizer.state[piece.param][key] = resting


def shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Not by address: the fake tensors of a dry run have none.
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _piece_states(
    unit: Unit, optimizer: torch.optim.Optimizer | None, missing: bool = False
) -> Iterator[tuple[nn.Parameter, Span, dict[str, Any]]]:
    if optimizer is None:
        return
    unit.synchronize()
    for piece, span in zip(unit.weights.pieces, piece_spans(unit), strict=True):
        if missing or piece.param in optimizer.state:
            yield piece.param, span, optimizer.state[piece.param]
