"""The update: any torch optimizer, unmodified, on the master pieces of a few units at a time.

The user's optimizer keeps its parameter groups and options; only the parameters in them are replaced by the master
pieces of the units. It is then stepped on one portion of the units after the other (see `budget`), in forward order,
with just their pieces in its groups.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.memory.ledger import Entry, Kind, Ledger, Tier
from shardwise.memory.reduce_plan import update_batches
from shardwise.optim.frozen import Frozen, has_frozen
from shardwise.optim.host_update import HostedUpdate, HostWorker, can_host, hosted
from shardwise.optim.optimizers import bare_step, members, prefer_fused
from shardwise.optim.streamed_update import StreamedUpdate, adopt, scaled
from shardwise.profiling import mark
from shardwise.unit.unit import Unit


class Updater:
    """Steps the user's optimizer on units."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit], ledger: Ledger) -> None:
        self.optimizer = optimizer
        self._ledger = ledger
        self._units = list(units)
        self._step = bare_step(optimizer)
        states = {id(param): state for param, state in optimizer.state.items()}
        optimizer.state.clear()
        for unit in units:
            _cut_state(optimizer, unit, states)
            adopt(optimizer, unit)
        self._counted: set[str] = set()
        self._frozen: set[str] = set()
        self._hands: HostWorker | None = None
        self._overflow: torch.Tensor | None = None
        count = len(optimizer.param_groups)
        self._pieces = {unit.name: [_in_group(unit, index) for index in range(count)] for unit in units}
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [piece for pieces in self._pieces.values() for piece in pieces[index]]
            prefer_fused(optimizer, group)
        # Only torch's own kernels look at `found_inf`; a subclass with a step of its own need not.
        is_torchs = getattr(self._step, "__module__", "").startswith("torch.optim")
        self._is_fused = is_torchs and all(group.get("fused") for group in optimizer.param_groups)
        # A bound method: LR schedulers look for the function behind it.
        for each in members(optimizer):
            each.step = MethodType(_use_engine_step, each)  # type: ignore[method-assign]  # refuses

    def begin(self, overflow: torch.Tensor | None) -> bool:
        """Before the units of a step; says whether to skip it.

        Fused kernels skip by themselves where `overflow` holds on the device. Others, and the first step, which makes
        the state, are skipped here, which waits for the device.
        """
        for hook in (*_global_optimizer_pre_hooks.values(), *self.optimizer._optimizer_step_pre_hooks.values()):
            hook(self.optimizer, (), {})
        self._overflow = None
        self._frozen = {unit.name for unit in self._units if has_frozen(unit)}
        if overflow is None:
            return False
        if self._is_fused and self._counted:
            self._overflow = overflow
            self.optimizer.found_inf = overflow.to(torch.float32)  # type: ignore[attr-defined]  # read by fused kernels
            return False
        return bool(overflow.item())

    def update_batches(self, units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
        """The units in the order given, those together that `update` takes together.

        What rests elsewhere comes unit by unit, and so does what needs room that grows with a portion: all kernels but
        torch's fused ones, and parameters that were frozen meanwhile.
        """
        resident: list[Unit] = []
        for unit in units:
            if unit.states is None and self._is_fused and unit.name not in self._frozen:
                resident.append(unit)
                continue
            yield from _in_batches(resident)
            resident = []
            yield [unit]
        yield from _in_batches(resident)

    def update(self, units: Sequence[Unit], coefficient: torch.Tensor | None) -> None:
        """Update the owned elements of a portion from its reduced gradients, multiplied with `coefficient`."""
        states = units[0].states
        if states is None or not (states.is_hosted or states.is_updated):
            self._update_here(units, coefficient)
            return
        (unit,) = units
        assert unit.grads is not None
        if states.is_hosted:
            assert self._hands is not None
            states.hosted = HostedUpdate(self._hands, unit, states, self._hands.told(coefficient, self._overflow))
        else:
            states.job = StreamedUpdate(self, unit, states, coefficient)
        unit.grads.forget()

    def _update_here(self, units: Sequence[Unit], coefficient: torch.Tensor | None) -> None:
        pieces: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        work: list[tuple[Entry, int]] = []
        frozen: list[Frozen] = []
        with mark("update", *(unit.name for unit in units)):
            try:
                for unit in units:
                    for all_pieces, own in zip(pieces, self._pieces[unit.name], strict=True):
                        all_pieces += own
                    work.append(self._cast(unit))
                    self._make_ready(unit, coefficient)
                    if unit.name in self._frozen:
                        frozen.append(Frozen(unit, self.optimizer))
                self.step_pieces(pieces, self.optimizer.param_groups)
                for unit in units:
                    self.account_for(unit)  # while gradients are there, beside which the first step makes its states
                for each in frozen:
                    each.put_back()
            finally:
                for own in pieces:
                    for piece in own:
                        piece.grad = None
                for entry, size_bytes in work:
                    self._ledger.remove(entry, size_bytes)
            for unit, (_, cast_bytes) in zip(units, work, strict=True):
                if unit.grads is not None and not cast_bytes:
                    unit.grads.clear()

    def _cast(self, unit: Unit) -> tuple[Entry, int]:
        """Enter into the ledger what gradients in fp32 take beside those in 16 bits."""
        assert unit.grads is not None
        entry, cast_bytes = Entry(Kind.WORK, unit.name, Tier.DEVICE), unit.grads.cast_bytes
        self._ledger.add(entry, cast_bytes)
        return entry, cast_bytes

    def _make_ready(self, unit: Unit, coefficient: torch.Tensor | None) -> None:
        """Give the optimizer's pieces the unit's gradients, in fp32; those in 16 bits are gone then."""
        assert unit.grads is not None
        grads = scaled(unit.grads.owned(), coefficient)
        for (_, piece), grad in zip(unit.weights.pieces, unit.weights.cut(grads), strict=True):
            piece.grad = grad
        if unit.grads.cast_bytes:
            unit.grads.clear()

    def host(self, share: float) -> None:
        """From here on, update so much of what rests on the host there; see `hosted`."""
        able = [unit for unit in self._units if can_host(unit.states)]
        for unit, is_hosted in zip(able, hosted([unit.layout.numel for unit in able], share), strict=True):
            assert unit.states is not None
            unit.states.is_hosted = is_hosted
            self._hands = self._hands or HostWorker(self, unit.comm.device)

    def beside(self, optimizer: torch.optim.Optimizer) -> Updater:
        """The same with another optimizer, a twin of ours: for another thread."""
        other = copy.copy(self)
        other.optimizer, other._step = optimizer, bare_step(optimizer)
        return other

    def close(self) -> None:
        """End what works beside."""
        if self._hands is not None:
            self._hands.close()

    def account(self) -> None:
        """Take into the ledger what state there is, after it was loaded."""
        self._counted.clear()
        for unit in self._units:
            if any(self.optimizer.state.get(piece) for _, piece in unit.weights.pieces):
                self.account_for(unit)

    def finish(self) -> None:
        """Tell hooks and LR schedulers that a step was taken."""
        for hook in (*self.optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(self.optimizer, (), {})
        for each in members(self.optimizer):
            each._opt_called = True  # type: ignore[attr-defined]  # read by schedulers

    def step_pieces(self, pieces: Sequence[list[nn.Parameter]], groups: list[dict[str, Any]]) -> None:
        """Step on `pieces`, a list for each of the `groups` of options."""
        before = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for group, own in zip(groups, pieces, strict=True):
                group["params"] = own
            self.optimizer.param_groups = [group for group in groups if group["params"]]
            self._step()
        finally:
            self.optimizer.param_groups = before
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    def account_for(self, unit: Unit) -> None:
        """Account for the state that the optimizer makes in its first step, and keeps on the device."""
        if unit.name in self._counted:
            return
        self._counted.add(unit.name)
        held = sum(
            value.numel() * value.element_size()
            for _, piece in unit.weights.pieces
            for value in self.optimizer.state.get(piece, {}).values()
            if isinstance(value, torch.Tensor)
            and (unit.states is None or not unit.states.holds_states or not value.ndim)
        )
        self._ledger.set_bytes(Entry(Kind.OPTIM, f"{unit.name} (moments)", Tier.DEVICE), held)


def _in_batches(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    sizes = [unit.grads.update_sizes for unit in units if unit.grads is not None]
    for portion in update_batches(sizes):
        yield units[portion.start : portion.stop]


def _in_group(unit: Unit, index: int) -> list[nn.Parameter]:
    return [piece for number, piece in unit.weights.pieces if number == index]


def _cut_state(optimizer: torch.optim.Optimizer, unit: Unit, states: Mapping[int, dict[str, Any]]) -> None:
    """Give a unit's pieces their part of the state that the optimizer had on whole parameters.

    Some optimizers make state when they are built (Adagrad), others have taken steps before.
    """
    weights = unit.weights
    pairs = list(zip(unit.layout.slots, unit.params, strict=True))
    for (group, piece), span in zip(weights.pieces, weights.piece_spans, strict=True):
        wanted = span.shift(weights.owned.start)
        inside = [(slot, param) for slot, param in pairs if slot.span.intersect(wanted)]
        # A piece that is nothing but padding has state as others of its group have, zeros.
        for slot, param in inside or [pair for pair in pairs if pair[0].spec.group == group]:
            part = slot.span.intersect(wanted)
            for key, value in states.get(id(param), {}).items():
                if isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step":
                    flat = optimizer.state[piece].setdefault(key, value.new_zeros(piece.shape)).view(-1)
                    if part:
                        flat[part.shift(-wanted.start).slice] = value.reshape(-1)[part.shift(-slot.span.start).slice]
                else:
                    optimizer.state[piece].setdefault(key, copy.deepcopy(value))


def _use_engine_step(self: torch.optim.Optimizer, closure: Any = None) -> None:
    raise RuntimeError("this optimizer works inside a shardwise engine: call engine.step() instead of optimizer.step()")


# What LR schedulers put on the step they wrap; they need not wrap this one, `Updater.finish` tells them of each step.
_use_engine_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # read by schedulers
