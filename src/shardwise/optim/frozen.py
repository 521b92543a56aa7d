"""Parameters whose `requires_grad` changes under an engine.

torch's optimizers pass over a parameter without a gradient: neither momentum nor decay moves it, and its state stays.
A piece of which all is frozen is passed over just so. Others hold more parameters than one, and the elements of those
frozen meanwhile are put back as they were. The other way round there is no gradient buffer and no state to begin with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.partition.layout import Span
from shardwise.unit.unit import Unit


def check_none_thawed(units: Sequence[Unit]) -> None:
    """Refuse to go on where a parameter that was frozen when the engine was made has become trainable."""
    with torch._C.DisableTorchFunctionSubclass():
        thawed = [
            name
            for unit in units
            if unit.grads is None
            for name, param in zip(unit.names, unit.params, strict=True)
            if param.requires_grad
        ]
    if thawed:
        raise RuntimeError(
            f"{thawed[0]!r} was frozen when the engine was made, and now requires gradients, for which there is no "
            "room: initialize with it trainable and freeze it then (a frozen parameter is left alone by step()), or "
            "copy.deepcopy(engine.module) and initialize that"
        )


def has_frozen(unit: Unit) -> bool:
    """Whether a parameter of a trainable unit was frozen meanwhile."""
    with torch._C.DisableTorchFunctionSubclass():
        return not all(param.requires_grad for param in unit.params)


class Frozen:
    """The elements of a unit's frozen parameters as they are now, state included, which its update shall not change."""

    def __init__(self, unit: Unit, optimizer: torch.optim.Optimizer) -> None:
        _pass_over_whole(unit)
        self._unit, self._optimizer = unit, optimizer
        self._spans = [span for span, is_frozen in _owned_spans(unit) if is_frozen]
        self._before = [(place, place.clone()) for place in _places(unit, optimizer, self._spans)]
        self._had_state = any(optimizer.state.get(piece) for _, piece in unit.weights.pieces)

    def put_back(self) -> None:
        """After the update."""
        if not self._had_state:  # made just now: a frozen parameter begins with none
            for place in _places(self._unit, self._optimizer, self._spans)[len(self._before) :]:
                place.zero_()
        for place, value in self._before:
            place.copy_(value)


def _owned_spans(unit: Unit) -> list[tuple[Span, bool]]:
    """Where parameters lie in the owned elements, and whether they are frozen."""
    owned = unit.weights.owned
    with torch._C.DisableTorchFunctionSubclass():
        slots = [
            (slot.span.intersect(owned), param.requires_grad)
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        ]
    return [(span.shift(-owned.start), not is_trained) for span, is_trained in slots if span]


def _pass_over_whole(unit: Unit) -> None:
    """Take the gradient from pieces that only hold frozen parameters."""
    spans = _owned_spans(unit)
    for (_, piece), cut in zip(unit.weights.pieces, unit.weights.piece_spans, strict=True):
        if all(is_frozen for span, is_frozen in spans if span.intersect(cut)):
            piece.grad = None


def _places(unit: Unit, optimizer: torch.optim.Optimizer, spans: Sequence[Span]) -> list[torch.Tensor]:
    """The frozen elements of the master copy, then those of all state laid out as it is."""
    weights = unit.weights
    places = [weights.master.detach()[span.slice] for span in spans]
    for (_, piece), cut in zip(weights.pieces, weights.piece_spans, strict=True):
        parts = [part.shift(-cut.start) for part in (span.intersect(cut) for span in spans) if part]
        for value in optimizer.state.get(piece, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == piece.shape:
                places += [value.view(-1)[part.slice] for part in parts]
    return places
