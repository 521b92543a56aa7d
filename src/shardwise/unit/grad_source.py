"""The gradients that a reduce-scatter sends: as autograd leaves them in `p.grad`, or in one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.partition import Layout, Span
from shardwise.partition.dtensors import is_dtensor, local_grads
from shardwise.unit.param_guard import PLAINLY


class GradSource(Protocol):
    """Gradients to send: `numel` of them in one flat order, in `wire_dtype`."""

    numel: int
    wire_dtype: torch.dtype

    def whole(self) -> torch.Tensor | None:
        """All of them in one tensor, if that needs no other buffer than their own."""

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        """Cut them into as many parts as `sent` has rows, and copy the elements from `start` to `stop` of each."""

    def packed(self) -> None:
        """Everything is in buffers: drop what is not needed any more."""

    def sent(self) -> None:
        """Everything is sent: free what `whole` returned."""


class Packing:
    """A buffer laid out as the unit is, into which the gradients of its parameters are copied in one operation."""

    def __init__(self, buffer: Buffer, layout: Layout) -> None:
        self.buffer = buffer
        self.views = buffer.views(layout)

    def fill(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy every gradient into place; zeros where there is none, and in between."""
        places, blanks = self.views, self.buffer.gaps
        present = [grad for grad in grads if grad is not None]
        if len(present) < len(grads):
            blanks = blanks + [view for view, grad in zip(places, grads, strict=True) if grad is None]
            places = [view for view, grad in zip(places, grads, strict=True) if grad is not None]
        if present:
            torch._foreach_copy_(places, present)
        if blanks:
            torch._foreach_zero_(blanks)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add every gradient in place."""
        pairs = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])


class AutogradGrads:
    """The gradients of a unit as autograd leaves them, each in its parameter's `grad`."""

    def __init__(self, name: str, params: Sequence[torch.Tensor], packing: Packing, layout: Layout, ledger: Ledger):
        self.params = list(params)
        self.numel = layout.numel
        self.wire_dtype = packing.buffer.tensor.dtype
        self._packing = packing
        self._layout = layout
        self._ledger = ledger
        self._entry = Entry(Kind.GRADS, f"{name} (local)", Tier.DEVICE)
        self._has_dtensors = any(map(is_dtensor, params))

    def expect(self, size_bytes: int) -> None:
        """Enter into the ledger what autograd is about to make."""
        self._ledger.set_bytes(self._entry, size_bytes)

    def read(self) -> list[torch.Tensor | None]:
        """The gradients as plain values: a backward with `create_graph` leaves some that have a history."""
        with PLAINLY():
            grads = [param.grad for param in self.params]
            if self._has_dtensors:
                grads = local_grads(self.params, grads)
        if not torch.is_grad_enabled():
            return grads
        return [grad if grad is None else grad.detach() for grad in grads]

    def exist(self) -> bool:
        """Whether a parameter has a gradient."""
        with PLAINLY():
            return bool([param for param in self.params if param.grad is not None])

    def replace(self, views: Sequence[torch.Tensor]) -> None:
        """Make each `grad` a view, to which autograd adds in place."""
        with PLAINLY():
            for param, view in zip(self.params, views, strict=True):
                param.grad = view
        self.expect(0)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients that arrived elsewhere."""
        with PLAINLY(), torch.no_grad():
            for param, grad in zip(self.params, grads, strict=True):
                if grad is not None:
                    param.grad = grad if param.grad is None else param.grad.add_(grad)

    def drop(self) -> None:
        """Take the gradients off the parameters."""
        with PLAINLY():
            for param in self.params:
                param.grad = None
        self.expect(0)

    # As a `GradSource`

    def whole(self) -> torch.Tensor | None:
        flat = self._packing.buffer.allocate()
        self._packing.fill(self.read())
        return flat

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        grads, part_numel = self.read(), self.numel // len(sent)
        for index, row in enumerate(sent):
            _lay_out(row, Span(start, stop).shift(index * part_numel), grads, self._layout)

    def packed(self) -> None:
        self.drop()

    def sent(self) -> None:
        self._packing.buffer.free()


class FlatGrads:
    """Gradients in a flat buffer, which may be overwritten: a `GradSource`."""

    def __init__(self, flat: torch.Tensor, wire_dtype: torch.dtype) -> None:
        self.numel = flat.numel()
        self.wire_dtype = wire_dtype
        self._flat = flat

    def whole(self) -> torch.Tensor | None:
        return self._flat if self._flat.dtype == self.wire_dtype else None

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        sent.copy_(self._flat.view(len(sent), -1)[:, start:stop])

    def packed(self) -> None:
        pass

    def sent(self) -> None:
        pass


def _lay_out(target: torch.Tensor, wanted: Span, grads: Sequence[torch.Tensor | None], layout: Layout) -> None:
    """Copy the gradients that fall into `wanted` of the flat buffer to `target`, with zeros in between."""
    target.zero_()
    for slot, grad in zip(layout.slots, grads, strict=True):
        part = slot.span.intersect(wanted)
        if part and grad is not None:
            flat = grad.reshape(-1)
            target[part.shift(-wanted.start).slice] = flat[part.shift(-slot.span.start).slice]
