"""A unit: the parameters that are gathered and reduced together, with their weights, gradients and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

import torch

from shardwise.comm import Comm
from shardwise.offload.context import OffloadContext
from shardwise.offload.offloaded_states import OffloadedStates, unit_states_for
from shardwise.offload.unit_states import ResidentStates
from shardwise.partition.dtensors import whole
from shardwise.unit.grads import Grads
from shardwise.unit.plan import UnitPlan
from shardwise.unit.state_view import StateView
from shardwise.unit.weights import Weights

_NUMBERS = count()
"""Units are numbered as they are made, in the same order on every rank: a canonical order across engines."""


class Unit:
    """One unit: name and layout, `weights`, `states`, and `grads`, which a frozen one does not have.

    `on_read` is called with the unit when one of its parameters is used by hand while it is guarded.
    """

    grads: Grads

    def __init__(
        self,
        plan: UnitPlan,
        params: Mapping[str, torch.Tensor],
        comm: Comm,
        offload: OffloadContext,
        on_read: Callable[[Unit], bool],
    ) -> None:
        self.name = plan.name
        self.number = next(_NUMBERS)
        self.plan = plan
        self.spec = plan.spec
        self.layout = plan.layout
        self.is_trainable = plan.policy.trainable
        self.comm = comm
        self.names = [slot.spec.name for slot in plan.layout.slots]
        self.params = [params[name] for name in self.names]
        self.averages: list[StateView] = []
        """What lasts besides master and optimizer state."""
        self.states = unit_states_for(plan.name, plan.policy, plan.owned_numel, offload)
        self.weights = Weights(plan, self.params, comm, offload.ledger, self.states, partial(on_read, self))
        self.weights.adopt()
        if self.is_trainable:
            self.grads = Grads(plan, self.params, comm, offload.ledger, self.states)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """One parameter's part of a flat tensor in this unit's layout."""
        slot = self.layout.slot(name)
        return flat[slot.span.slice].view(slot.spec.shape)

    def whole(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """A copy of one parameter's part of a flat tensor, made whole where tensor parallelism has cut it. A collective
        over that axis."""
        return whole(self.params[self.names.index(name)], self.view(flat, name)).clone()

    def finish_update(self) -> None:
        """Issue what is pending of the last update, and order the compute stream after it."""
        self.weights.wait_streams()
        self.states.run_update()

    def synchronize(self) -> None:
        """Block the host until the states are where they rest, to be read or replaced."""
        self.finish_update()
        self.states.synchronize()

    def make_resident(self, optimizer: torch.optim.Optimizer) -> None:
        """Move all states to the device, where they stay. Between a step and the next forward."""
        before, resident = self.states, ResidentStates()
        if not isinstance(before, OffloadedStates) or not self.is_trainable:
            return
        self.synchronize()
        self.weights.make_resident(resident)
        self.grads.make_resident(resident)
        for piece in self.weights.pieces:
            state = optimizer.state.get(piece.param, {})
            for key in [key for key in state if key in before and state[key].shape == piece.param.shape]:
                values = before.read(key, piece.span).view(state[key].shape)
                state[key] = values.to(self.comm.device, copy=True)
        before.free()
        self.states = resident

    def leave_disk(self, optimizer: torch.optim.Optimizer) -> None:
        """Move what rests on a disk to the host, where it stays. Between a step and the next forward."""
        states = self.states
        if not isinstance(states, OffloadedStates):
            return
        self.synchronize()
        states.leave_disk()
        self.weights.bind_pieces()
        for piece in self.weights.pieces:
            state = optimizer.state.get(piece.param, {})
            for key in [key for key in state if key in states and state[key].shape == piece.param.shape]:
                state[key] = states.storages[key].at_rest(piece.span, piece.param.shape)

    def free(self) -> None:
        """Drop every buffer, once nothing reads it any more."""
        self.weights.wait_streams()
        if self.is_trainable:
            self.grads.clear()
        self.states.free()  # before the weights: an update on the host may be working on the pieces
        self.weights.free()
