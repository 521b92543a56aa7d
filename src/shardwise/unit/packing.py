"""Local gradients as a reduce-scatter sends them: where autograd leaves them, and how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.partition import Layout, Span
from shardwise.unit.param_guard import PLAINLY


class GradSource(Protocol):
    """Local gradients to send, seen as [W, shard]."""

    def whole(self, dtype: torch.dtype) -> torch.Tensor | None:
        """All of them in one tensor, if that needs no other buffer than their own."""

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        """Copy the columns from `start` to `stop` of every shard."""

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

    def __init__(self, name: str, params: Sequence[nn.Parameter], packing: Packing, layout: Layout, ledger: Ledger):
        self.params = list(params)
        self._packing = packing
        self._layout = layout
        self._ledger = ledger
        self._entry = Entry(Kind.GRADS, f"{name} (local)", Tier.DEVICE)

    def expect(self, size_bytes: int) -> None:
        """Enter into the ledger what autograd is about to make."""
        self._ledger.set_bytes(self._entry, size_bytes)

    def read(self) -> list[torch.Tensor | None]:
        """The gradients as plain values: a backward with `create_graph` leaves some that have a history."""
        with PLAINLY():
            grads = [param.grad for param in self.params]
        if not torch.is_grad_enabled():
            return grads
        return [grad if grad is None else grad.detach() for grad in grads]

    def exist(self) -> bool:
        """Whether a parameter has a gradient."""
        with PLAINLY():
            return any(param.grad is not None for param in self.params)

    def replace(self, views: Sequence[torch.Tensor]) -> None:
        """Make each `grad` a view, to which autograd adds in place."""
        for param, view in zip(self.params, views, strict=True):
            param.grad = view
        self.expect(0)

    def drop(self) -> None:
        """Take the gradients off the parameters."""
        with PLAINLY():
            for param in self.params:
                param.grad = None
        self.expect(0)

    # As a `GradSource`

    def whole(self, dtype: torch.dtype) -> torch.Tensor | None:
        flat = self._packing.buffer.allocate()
        self._packing.fill(self.read())
        return flat.view(self._layout.world_size, -1)

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        grads = self.read()
        for rank, row in enumerate(sent):
            _lay_out(row, Span(start, stop).shift(rank * self._layout.shard_numel), grads, self._layout)

    def packed(self) -> None:
        self.drop()

    def sent(self) -> None:
        self._packing.buffer.free()


class FlatGrads:
    """Gradients in the unit's flat buffer, a `GradSource`."""

    def __init__(self, flat: torch.Tensor, world_size: int) -> None:
        self._shards = flat.view(world_size, -1)

    def whole(self, dtype: torch.dtype) -> torch.Tensor | None:
        return self._shards if self._shards.dtype == dtype else None

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        sent.copy_(self._shards[:, start:stop])

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
