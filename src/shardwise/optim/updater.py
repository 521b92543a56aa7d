"""The update of a step: the user's optimizer on the master pieces of a few units at a time, in forward order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.memory import Entry, Kind, Ledger, Tier
from shardwise.memory.reduce_plan import update_batches
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.optim.frozen import Frozen, has_frozen
from shardwise.optim.host_update import HostedUpdate, HostWorker, hosted
from shardwise.optim.optimizers import members
from shardwise.optim.piece_optimizer import PieceOptimizer, scaled
from shardwise.optim.streamed_update import StreamedUpdate
from shardwise.profiling import mark
from shardwise.unit import Unit


class Updater:
    """Steps the user's optimizer on units."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit], ledger: Ledger) -> None:
        self.optimizer = optimizer
        self._ledger = ledger
        self._units = list(units)
        self._pieces = PieceOptimizer(optimizer, units, ledger)
        self._is_fused = self._pieces.is_fused
        self._frozen: set[str] = set()
        self._worker: HostWorker | None = None
        self._overflow: torch.Tensor | None = None
        count = len(optimizer.param_groups)
        self._params = {unit.name: [_in_group(unit, index) for index in range(count)] for unit in units}

    def begin(self, overflow: torch.Tensor | None) -> bool:
        """Before the units of a step; returns whether to skip it.

        Fused kernels skip by themselves where `overflow` holds on the device. Other kernels, and the first step, which
        makes the state, are skipped here, which waits for the device.
        """
        for hook in (*_global_optimizer_pre_hooks.values(), *self.optimizer._optimizer_step_pre_hooks.values()):
            hook(self.optimizer, (), {})
        self._overflow = None
        self._frozen = {unit.name for unit in self._units if has_frozen(unit)}
        if overflow is None:
            return False
        if self._is_fused and self._pieces.has_state:
            self._overflow = overflow
            self.optimizer.found_inf = overflow.to(torch.float32)  # type: ignore[attr-defined]  # read by fused kernels
            return False
        return bool(overflow.item())

    def batches(self, units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
        """The units in the order given, grouped as `update` takes them.

        Offloaded units come one by one, and so do those that need memory that grows with a batch: all kernels but
        torch's fused ones, and parameters that were frozen since.
        """
        resident: list[Unit] = []
        for unit in units:
            if not unit.states.is_offloaded and self._is_fused and unit.name not in self._frozen:
                resident.append(unit)
                continue
            yield from _in_batches(resident)
            resident = []
            yield [unit]
        yield from _in_batches(resident)

    def update(self, units: Sequence[Unit], coefficient: torch.Tensor | None) -> None:
        """Update the owned elements of a batch from its reduced gradients, multiplied with `coefficient`."""
        unit, states = units[0], units[0].states
        if not isinstance(states, OffloadedStates) or not states.is_streamed:
            self._update_resident(units, coefficient)
        elif states.updates_on_host:
            assert self._worker is not None
            scalars = self._worker.scalars(coefficient, self._overflow)
            states.host_update = HostedUpdate(self._worker, unit, states, scalars)
            unit.grads.forget()
        else:
            states.pending = StreamedUpdate(self._pieces, unit, states, coefficient)
            unit.grads.forget()

    def _update_resident(self, units: Sequence[Unit], coefficient: torch.Tensor | None) -> None:
        params: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        casts: list[tuple[Entry, int]] = []
        frozen: list[Frozen] = []
        with mark("update", *(unit.name for unit in units)):
            try:
                for unit in units:
                    for all_params, own in zip(params, self._params[unit.name], strict=True):
                        all_params += own
                    casts.append(self._account_cast(unit))
                    _give_grads(unit, coefficient)
                    if unit.name in self._frozen:
                        frozen.append(Frozen(unit, self.optimizer))
                self._pieces.step(params, self.optimizer.param_groups)
                for unit in units:
                    self._pieces.account_for(unit)  # while the gradients exist: the first step makes states
                for each in frozen:
                    each.restore()
            finally:
                for own in params:
                    for param in own:
                        param.grad = None
                for entry, size_bytes in casts:
                    self._ledger.remove(entry, size_bytes)
            for unit in units:
                if not unit.grads.cast_bytes:
                    unit.grads.clear()

    def _account_cast(self, unit: Unit) -> tuple[Entry, int]:
        """Enter into the ledger what gradients in fp32 take beside those in 16 bits."""
        entry, cast_bytes = Entry(Kind.WORK, unit.name, Tier.DEVICE), unit.grads.cast_bytes
        self._ledger.add(entry, cast_bytes)
        return entry, cast_bytes

    def use_host(self, share: float) -> None:
        """Update that share of what rests on the host there from now on; see `host_update`."""
        able = [
            (unit, unit.states)
            for unit in self._units
            if isinstance(unit.states, OffloadedStates) and unit.states.can_update_on_host
        ]
        chosen = hosted([unit.layout.numel for unit, _ in able], share)
        for (unit, states), is_hosted in zip(able, chosen, strict=True):
            states.updates_on_host = is_hosted
            self._worker = self._worker or HostWorker(self._pieces, unit.comm.device)

    def account(self) -> None:
        """Account for the state of all units anew, after it was loaded or moved."""
        self._pieces.account(self._units)

    def finish(self) -> None:
        """Tell hooks and LR schedulers that a step was taken."""
        for hook in (*self.optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(self.optimizer, (), {})
        for each in members(self.optimizer):
            each._opt_called = True  # type: ignore[attr-defined]  # read by schedulers

    def close(self) -> None:
        """End the thread that updates on the host."""
        if self._worker is not None:
            self._worker.close()


def _give_grads(unit: Unit, coefficient: torch.Tensor | None) -> None:
    """Give the optimizer's pieces the unit's gradients, in fp32; those in 16 bits are freed."""
    grads = scaled(unit.grads.owned(), coefficient)
    for piece, grad in zip(unit.weights.pieces, unit.weights.cut(grads), strict=True):
        piece.param.grad = grad
    if unit.grads.cast_bytes:
        unit.grads.clear()


def _in_batches(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    for batch in update_batches([unit.grads.update_sizes for unit in units]):
        yield units[batch.start : batch.stop]


def _in_group(unit: Unit, index: int) -> list[nn.Parameter]:
    return [piece.param for piece in unit.weights.pieces if piece.group == index]
