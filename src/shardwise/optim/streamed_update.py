"""The update of a unit whose states rest off the device: the same kernel, on one bucket after the other.

While a bucket is on the device, the optimizer's pieces and its state are views of a slot of the pool; at rest they are
what the storages say. What the optimizer makes in its first step is taken down and rests there from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.offload.storage import StateStorage
from shardwise.offload.unit_states import GRADS, MASTER, Bucket, Made, UnitStates, Views
from shardwise.partition.layout import Span
from shardwise.profiling import mark
from shardwise.unit.unit import Unit

if TYPE_CHECKING:
    from shardwise.optim.updater import Updater


class StreamedUpdate:
    """One unit's update in one step: a `Job` of its states."""

    def __init__(self, updater: Updater, unit: Unit, states: UnitStates, coefficient: torch.Tensor | None) -> None:
        assert unit.grads is not None
        check_none_frozen(unit)
        self._updater = updater
        self._unit = unit
        self._states = states
        # Kept until the computing stream comes after the last kernel that reads them.
        self._coefficient = coefficient
        self._reduced = None if GRADS in states else unit.grads.owned()
        # The update may be issued after a scheduler has moved on.
        self._groups = [options_now(group) for group in updater.optimizer.param_groups]
        adopt(updater.optimizer, unit)

    def __call__(self, bucket: Bucket, views: Views) -> Made:
        with mark("update", self._unit.name):
            reduced = views[GRADS] if self._reduced is None else self._reduced[bucket.span.slice]
            room = None if reduced.dtype == torch.float32 else self._states.offload.pool.scratch(reduced.numel())
            grads = scaled(reduced, self._coefficient, room)
            optimizer, weights = self._updater.optimizer, self._unit.weights
            groups: list[list[nn.Parameter]] = [[] for _ in self._groups]
            for number in bucket.pieces:
                group, piece = weights.pieces[number]
                groups[group].append(piece)
                inside = weights.piece_spans[number].shift(-bucket.span.start).slice
                shape = piece.shape
                if MASTER in views:
                    piece.data = views[MASTER][inside].view(shape)
                piece.grad = grads[inside].view(shape)
                for key in _per_element(optimizer, piece) if self._states.holds_states else ():
                    optimizer.state[piece][key] = views[key][inside].view(shape)
            self._updater.step_pieces(groups, self._groups)
            return [place for number in bucket.pieces for place in self._put_to_rest(number, views)]

    def done(self) -> None:
        assert self._unit.grads is not None
        if self._reduced is not None:
            self._unit.grads.clear()
        self._reduced = self._coefficient = None

    def _put_to_rest(self, number: int, views: Views) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """Bind a piece and its state to where they rest again; yields what the optimizer made."""
        weights, optimizer, states = self._unit.weights, self._updater.optimizer, self._states
        (_, piece), span = weights.pieces[number], weights.piece_spans[number]
        piece.grad = None
        if MASTER in states:
            piece.data = states.storages[MASTER].at_rest(span, piece.shape)
        self._updater.account_for(self._unit)
        for key in _per_element(optimizer, piece) if states.holds_states else ():
            value = optimizer.state[piece][key]
            optimizer.state[piece][key] = _storage_of(states, key, value).at_rest(span, value.shape)
            if key not in views or not _shares_storage(value, views[key]):
                yield key, span, value


def adopt(optimizer: torch.optim.Optimizer, unit: Unit) -> None:
    """Let state rest that somebody put into the optimizer: made before the engine was, or loaded."""
    states = unit.states
    if states is None or not states.holds_states:
        return
    for (_, piece), span in zip(unit.weights.pieces, unit.weights.piece_spans, strict=True):
        for key in _per_element(optimizer, piece):
            value = optimizer.state[piece][key]
            resting = _storage_of(states, key, value).at_rest(span, value.shape)
            if not _shares_storage(value, resting):
                states.write(key, span, value.reshape(-1))
                optimizer.state[piece][key] = resting


def scaled(grads: torch.Tensor, coefficient: torch.Tensor | None, room: torch.Tensor | None = None) -> torch.Tensor:
    """Gradients in fp32, times `coefficient`; where they are, or in one pass from 16 bits, into `room` if there is."""
    if grads.dtype == torch.float32:
        return grads if coefficient is None else grads.mul_(coefficient)
    if coefficient is None:
        return grads.to(torch.float32) if room is None else room.copy_(grads)
    return torch.mul(grads, coefficient, out=room)


def _storage_of(states: UnitStates, key: str, value: torch.Tensor) -> StateStorage:
    """What a state rests in."""
    return states.storages[key] if key in states else states.add(key, value.dtype)


def check_none_frozen(unit: Unit) -> None:
    """Elements of parameters that were frozen meanwhile would have to be put back; on the device they are."""
    with torch._C.DisableTorchFunctionSubclass():
        frozen = [name for name, param in zip(unit.names, unit.params, strict=True) if not param.requires_grad]
    if frozen:
        raise RuntimeError(
            f"{frozen[0]!r} was trainable when the engine was made and is frozen now, and its states rest off the "
            "device, where a part of a unit cannot be left alone: initialize with it frozen, or without offload"
        )


def _shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Not by address: fake tensors, with which a run is foreseen, have none.
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _per_element(optimizer: torch.optim.Optimizer, piece: nn.Parameter) -> list[str]:
    """The keys of a piece's state that have a value for each of its elements."""
    tensors = {key: value for key, value in optimizer.state.get(piece, {}).items() if isinstance(value, torch.Tensor)}
    return [key for key, value in tensors.items() if value.ndim and value.shape == piece.shape]


def options_now(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they are now, without its parameters."""
    options = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    return {**options, "params": []}
