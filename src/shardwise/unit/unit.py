"""A unit: the parameters that are gathered and reduced together, with their weights and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.comm.comm import Comm
from shardwise.offload.context import OffloadContext
from shardwise.offload.unit_states import unit_states_for
from shardwise.partition.layout import Cut, Layout, TensorSpec
from shardwise.partition.policy import Group, Policy
from shardwise.partition.units import UnitSpec
from shardwise.unit.grads import Grads
from shardwise.unit.weights import Weights

if TYPE_CHECKING:
    from shardwise.optim.states import StateView


@dataclass
class Traffic:
    """How often a unit was entered since the last backward; says when its gradients are complete.

    loud_uses     with gradients on; the first such use is the last one that the backward leaves
    quiet_uses    with gradients off inside a forward that has them on: a re-entrant checkpoint, which will recompute
    recomputed    recomputations that the backward has left
    """

    loud_uses: int = 0
    quiet_uses: int = 0
    recomputed: int = 0
    is_done: bool = False


_NUMBERS = count()
"""Units are numbered as they are made, which is the same on every rank: a canonical order across engines."""


class Unit:
    """One unit: name and layout, `weights`, and `grads` if it is trainable."""

    def __init__(
        self,
        spec: UnitSpec,
        params: Mapping[str, nn.Parameter],
        layout: Layout,
        policy: Policy,
        comm: Comm,
        offload: OffloadContext,
    ) -> None:
        ledger = offload.ledger
        self.name = spec.name
        self.number = next(_NUMBERS)
        self.spec = spec
        self.layout = layout
        self.comm = comm
        self.names = [slot.spec.name for slot in layout.slots]
        self.params = [params[name] for name in self.names]
        self.traffic = Traffic()
        self.kept: list[StateView] = []  # what lasts besides master and optimizer state: averages
        owned_numel = layout.shard_numel if policy.optim_sharded else layout.numel
        self.states = unit_states_for(spec.name, policy, owned_numel, offload)
        self.weights = Weights(spec.name, self.params, layout, policy, comm, ledger, self.states)
        self.grads: Grads | None = None
        self.weights.adopt()
        if policy.trainable:
            self.grads = Grads(spec.name, self.params, layout, policy, comm, ledger, self.states)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """One parameter's part of a flat tensor in this unit's layout."""
        slot = self.layout.slot(name)
        return flat[slot.span.slice].view(slot.spec.shape)

    def settle(self) -> None:
        """Do what is due of the last update, and have the computing stream come after it."""
        self.weights.catch_up()
        if self.states is not None:
            self.states.flush()

    def quiet(self) -> None:
        """Have the host wait until the states are where they rest, to be looked at or replaced."""
        self.settle()
        if self.states is not None:
            self.states.quiet()

    def move_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Let everything rest on the device from here on. Between a step and the next forward."""
        if self.states is None or self.grads is None:
            return
        self.quiet()
        self.weights.move_in()
        self.grads.move_in()
        for (_, piece), span in zip(self.weights.pieces, self.weights.piece_spans, strict=True):
            state = optimizer.state.get(piece, {})
            for key in [key for key in state if key in self.states and state[key].shape == piece.shape]:
                values = self.states.read(key, span).view(state[key].shape)
                state[key] = values.to(self.comm.device, copy=True)
        self.states.free()
        self.states = None

    def leave_disk(self, optimizer: torch.optim.Optimizer) -> None:
        """Let what rests on the disk rest on the host from here on. Between a step and the next forward."""
        if self.states is None:
            return
        self.quiet()
        self.states.leave_disk()
        self.weights.bind_pieces()
        for (_, piece), span in zip(self.weights.pieces, self.weights.piece_spans, strict=True):
            state = optimizer.state.get(piece, {})
            for key in [key for key in state if key in self.states and state[key].shape == piece.shape]:
                state[key] = self.states.storages[key].at_rest(span, piece.shape)

    def free(self) -> None:
        """Drop every buffer, once nothing reads it any more."""
        self.weights.catch_up()
        if self.grads is not None:
            self.grads.clear()
        if self.states is not None:
            self.states.free()  # an update on the host may be at work on the pieces
        self.weights.free()


def layout_for(
    spec: UnitSpec, params: Mapping[str, nn.Parameter], groups: Mapping[str, Group], policy: Policy, world_size: int
) -> Layout:
    """The layout of a unit; `groups` gives the optimizer group of each trainable parameter.

    One tensor that must stay whole makes the unit's cuts fall between tensors.
    """
    specs = []
    for name in spec.params:
        number, whole = groups.get(name, Group(0)) if policy.trainable else Group(0)
        specs.append(TensorSpec(name, tuple(params[name].shape), number, whole))
    cut = Cut.TENSOR if any(tensor.whole for tensor in specs) else Cut.ELEMENT
    return Layout.build(specs, world_size, policy.weight_dtype.itemsize, cut)
