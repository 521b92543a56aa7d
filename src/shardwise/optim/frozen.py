"""Parameters whose `requires_grad` changes under an engine.

torch's optimizers skip a parameter without a gradient: neither momentum nor decay changes it, and its state stays. A
unit of which all parameters of a group are frozen is skipped the same way. Other pieces hold several parameters, and
the elements of the frozen ones are restored after the update. A parameter that was frozen when the engine was made and
is trainable now has no gradient buffer and no state: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.partition import Span
from shardwise.unit import Unit
from shardwise.unit.params import PLAINLY


def check_frozen(units: Sequence[Unit]) -> None:
    """Before any unit is updated, refuse a parameter that was frozen when the engine was made and is trainable now; and
    where states rest off the device, one that was frozen since: its elements would not be restored."""
    with PLAINLY():
        thawed = [
            name for unit in units if not unit.is_trainable for name, param in _named(unit) if param.requires_grad
        ]
        streamed = [unit for unit in units if unit.is_trainable and unit.states.is_streamed]
        frozen = [name for unit in streamed for name, param in _named(unit) if not param.requires_grad]
    if thawed:
        raise RuntimeError(
            f"{thawed[0]!r} was frozen when the engine was made, and now requires gradients, for which there is no "
            "room: initialize with it trainable and freeze it then (a frozen parameter is left alone by step()), or "
            "copy.deepcopy(engine.module) and initialize that"
        )
    if frozen:
        raise RuntimeError(
            f"{frozen[0]!r} was trainable when the engine was made and is frozen now, and its states rest off the "
            "device, where a part of a unit cannot be left alone: initialize with it frozen, or without offload"
        )


def count_frozen(unit: Unit) -> int:
    """How many parameters of a trainable unit were frozen since."""
    with PLAINLY():
        return len([param for param in unit.params if not param.requires_grad])


def _named(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(unit.names, unit.params, strict=True)


class Frozen:
    """The elements of a unit's frozen parameters before its update, state included, to be restored after it."""

    def __init__(self, unit: Unit, optimizer: torch.optim.Optimizer) -> None:
        _skip_frozen_pieces(unit)
        self._unit, self._optimizer = unit, optimizer
        self._spans = [span for span, is_frozen in _owned_spans(unit) if is_frozen]
        self._before = [(place, place.clone()) for place in _places(unit, optimizer, self._spans)]
        self._had_state = any(optimizer.state.get(piece.param) for piece in unit.weights.pieces)

    def restore(self) -> None:
        """After the update."""
        if not self._had_state:  # made just now: a frozen parameter begins with none
            for place in _places(self._unit, self._optimizer, self._spans)[len(self._before) :]:
                place.zero_()
        for place, value in self._before:
            place.copy_(value)


def _owned_spans(unit: Unit) -> list[tuple[Span, bool]]:
    """Where parameters lie in the owned elements, and whether they are frozen."""
    owned = unit.weights.owned
    with PLAINLY():
        slots = [
            (slot.span.intersect(owned), param.requires_grad)
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        ]
    return [(span.shift(-owned.start), not is_trained) for span, is_trained in slots if span]


def _skip_frozen_pieces(unit: Unit) -> None:
    """Take the gradient off the pieces of a group of which the whole unit is frozen, so that the optimizer skips them.

    Not off every piece of frozen parameters alone: where the unit is cut differs between stages and ranks, and with it
    which elements have state and of how many steps. A tensor that is updated whole is a piece under every cut.
    """
    first = unit.weights.owned.start
    with PLAINLY():
        trained = [slot for slot, param in zip(unit.layout.slots, unit.params, strict=True) if param.requires_grad]
    for piece in unit.weights.pieces:
        same = [slot for slot in trained if slot.spec.group == piece.group]
        if not any(slot.span.shift(-first).intersect(piece.span) or not slot.spec.whole for slot in same):
            piece.param.grad = None


def _places(unit: Unit, optimizer: torch.optim.Optimizer, spans: Sequence[Span]) -> list[torch.Tensor]:
    """The frozen elements of the master copy, then those of all state laid out as it is."""
    weights = unit.weights
    places = [weights.master.detach()[span.slice] for span in spans]
    for piece in weights.pieces:
        parts = [part.shift(-piece.span.start) for part in (span.intersect(piece.span) for span in spans) if part]
        for value in optimizer.state.get(piece.param, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == piece.param.shape:
                places += [value.view(-1)[part.slice] for part in parts]
    return places
