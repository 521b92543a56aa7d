"""The user's optimizer on master pieces: its groups and options stay, the parameters in them are replaced.

It is stepped on the pieces of a few units at a time, with just these in its groups.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.memory import Entry, Kind, Ledger, Tier
from shardwise.optim.optimizers import bare_step, prefer_fused, twin
from shardwise.optim.states import offload_moments
from shardwise.unit import Unit

Groups = list[dict[str, Any]]


class PieceOptimizer:
    """Steps an optimizer on some of its pieces, and accounts for the state that it makes."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit], ledger: Ledger) -> None:
        self.optimizer = optimizer
        self._ledger = ledger
        self._step = bare_step(optimizer)
        self._accounted: set[str] = set()
        states = {id(param): state for param, state in optimizer.state.items()}
        optimizer.state.clear()
        for unit in units:
            _cut_state(optimizer, unit, states)
            offload_moments(optimizer, unit)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [piece.param for unit in units for piece in unit.weights.pieces if piece.group == index]
            prefer_fused(optimizer, group)

    @property
    def groups(self) -> Groups:
        return self.optimizer.param_groups

    @property
    def is_fused(self) -> bool:
        """Whether every step is by torch's fused kernels: only they skip by themselves where gradients overflowed."""
        is_torchs = getattr(self._step, "__module__", "").startswith("torch.optim")
        return is_torchs and all(group.get("fused") for group in self.groups)

    @property
    def has_state(self) -> bool:
        """Whether a step was taken, so that the optimizer has its state."""
        return bool(self._accounted)

    def for_thread(self) -> PieceOptimizer:
        """The same with a twin of the optimizer, which another thread may step."""
        other = copy.copy(self)
        other.optimizer = twin(self.optimizer)
        other._step = bare_step(other.optimizer)
        return other

    def step(self, params: Sequence[list[nn.Parameter]], groups: Groups) -> None:
        """Step on `params`, a list for each of the `groups` of options.

        Those without state, which were frozen until now, are stepped by themselves: fused SGD takes momentum of all or
        of none.
        """
        state = self.optimizer.state
        fresh = [[param for param in own if param.grad is not None and not state.get(param)] for own in params]
        others = [[param for param in own if state.get(param)] for own in params] if any(fresh) else []
        for each in (fresh, others) if any(others) else (params,):
            self._step_on(each, groups)

    def _step_on(self, params: Sequence[list[nn.Parameter]], groups: Groups) -> None:
        before = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for group, own in zip(groups, params, strict=True):
                group["params"] = own
            self.optimizer.param_groups = [group for group in groups if group["params"]]
            self._step()
        finally:
            self.optimizer.param_groups = before
            for group, own in zip(groups, everything, strict=True):
                group["params"] = own

    def account(self, units: Sequence[Unit]) -> None:
        """Account for the state of all units anew, after it was loaded or moved."""
        self._accounted.clear()
        for unit in units:
            if any(self.optimizer.state.get(piece.param) for piece in unit.weights.pieces):
                self.account_for(unit)

    def unaccounted(self, units: Sequence[Unit]) -> list[Unit]:
        """The units whose state is not in the ledger yet."""
        return [unit for unit in units if unit.name not in self._accounted]

    def account_for(self, unit: Unit) -> None:
        """Account for the state that the optimizer makes in its first step, and keeps on the device."""
        if unit.name in self._accounted:
            return
        self._accounted.add(unit.name)
        size_bytes = sum(
            value.numel() * value.element_size()
            for piece in unit.weights.pieces
            for value in self.optimizer.state.get(piece.param, {}).values()
            if isinstance(value, torch.Tensor) and not (unit.states.holds_moments and value.ndim)
        )
        self._ledger.set_bytes(Entry(Kind.OPTIM, f"{unit.name} (moments)", Tier.DEVICE), size_bytes)


def options_now(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they are now, without its parameters: a scheduler may change them before they are used."""
    options = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    return {**options, "params": []}


def scaled(grads: torch.Tensor, coefficient: torch.Tensor | None, room: torch.Tensor | None = None) -> torch.Tensor:
    """Gradients in fp32, times `coefficient`: in place, or from 16 bits in one pass, into `room` if it is given."""
    if grads.dtype == torch.float32:
        return grads if coefficient is None else grads.mul_(coefficient)
    if coefficient is None:
        return grads.to(torch.float32) if room is None else room.copy_(grads)
    # In fp32, rounded once: the coefficient has a dimension, so it promotes gradients of 16 bits (see `Clip`).
    return torch.mul(grads, coefficient, out=room)


def _cut_state(optimizer: torch.optim.Optimizer, unit: Unit, states: Mapping[int, dict[str, Any]]) -> None:
    """Give a unit's pieces their part of the state that the optimizer had on whole parameters.

    Some optimizers make state when they are built (Adagrad), others have taken steps before.
    """
    weights = unit.weights
    pairs = list(zip(unit.layout.slots, unit.params, strict=True))
    for piece in weights.pieces:
        wanted = piece.span.shift(weights.owned.start)
        inside = [(slot, param) for slot, param in pairs if slot.span.intersect(wanted)]
        # A piece that is nothing but padding has state as others of its group have, zeros.
        for slot, param in inside or [pair for pair in pairs if pair[0].spec.group == piece.group]:
            part, state = slot.span.intersect(wanted), optimizer.state[piece.param]
            for key, value in states.get(id(param), {}).items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step":
                    flat = state.setdefault(key, value.new_zeros(piece.param.shape)).view(-1)
                    if part:
                        flat[part.shift(-wanted.start).slice] = value.reshape(-1)[part.shift(-slot.span.start).slice]
                else:
                    state.setdefault(key, copy.deepcopy(value))
