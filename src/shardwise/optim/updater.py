"""The update of a step: the user's optimizer on the master pieces of a few units at a time, in forward order.

Units whose states rest on the device are updated in batches. Where they rest off the device, the same kernel runs on
one bucket after the other (`StreamedUpdate`): while a bucket is on the device, the optimizer's pieces and its state are
views of a buffer of the pool; otherwise they are what the storages say. State that the optimizer makes in its first
step is copied down and rests there from then on. For updates on the host, see `host_update`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.memory import Entry, Kind, Ledger, Tier
from shardwise.memory.reduce_plan import update_batches
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.offload.unit_states import GRADS, MASTER, Bucket, NewMoments, Views
from shardwise.optim.frozen import Frozen, count_frozen
from shardwise.optim.host_update import HostedUpdate, HostWorker, hosted
from shardwise.optim.optimizers import members
from shardwise.optim.piece_optimizer import PieceOptimizer, options_now, scaled
from shardwise.optim.states import offload_moments, per_element, shares_storage
from shardwise.partition import Span
from shardwise.profiling import mark
from shardwise.unit import Unit


class StreamedUpdate:
    """One unit's pending update in one step: a `BucketUpdate`."""

    def __init__(
        self, optimizer: PieceOptimizer, unit: Unit, states: OffloadedStates, coefficient: torch.Tensor | None
    ) -> None:
        self._optimizer = optimizer
        self._unit = unit
        self._states = states
        # Alive until the compute stream is ordered after the last kernel on the update stream that reads them: memory
        # of the compute stream that is freed before would be given to its next tensor (tests/test_offload_gpu.py).
        self._coefficient = coefficient
        self._reduced = None if GRADS in states else unit.grads.owned()
        reduced_dtype = states.storages[GRADS].dtype if self._reduced is None else self._reduced.dtype
        self.needs_room = reduced_dtype != torch.float32
        # The update may be issued after an LR scheduler has moved on.
        self._groups = [options_now(group) for group in optimizer.groups]
        offload_moments(optimizer.optimizer, unit)

    def __call__(self, bucket: Bucket, views: Views, room: torch.Tensor | None) -> NewMoments:
        with mark("update", self._unit.name):
            reduced = views[GRADS] if self._reduced is None else self._reduced[bucket.span.slice]
            grads = scaled(reduced, self._coefficient, room)
            state, pieces = self._optimizer.optimizer.state, self._unit.weights.pieces
            params: list[list[nn.Parameter]] = [[] for _ in self._groups]
            for piece in (pieces[number] for number in bucket.pieces):
                param, inside = piece.param, piece.span.shift(-bucket.span.start).slice
                params[piece.group].append(param)
                shape = param.shape
                if MASTER in views:
                    param.data = views[MASTER][inside].view(shape)
                param.grad = grads[inside].view(shape)
                for key in self._moments(param):
                    state[param][key] = views[key][inside].view(shape)
            self._optimizer.step(params, self._groups)
            self._optimizer.account_for(self._unit)
            return [moment for number in bucket.pieces for moment in self._put_back(number, views)]

    def done(self) -> None:
        if self._reduced is not None:
            self._unit.grads.clear()
        self._reduced = self._coefficient = None

    def _moments(self, param: nn.Parameter) -> list[str]:
        return per_element(self._optimizer.optimizer, param) if self._states.holds_moments else []

    def _put_back(self, number: int, views: Views) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """Bind a piece and its state to where they rest; yields the moments that the optimizer made."""
        piece, states = self._unit.weights.pieces[number], self._states
        param, state = piece.param, self._optimizer.optimizer.state
        param.grad = None
        if MASTER in states:
            param.data = states.storages[MASTER].at_rest(piece.span, param.shape)
        for key in self._moments(param):
            value = state[param][key]
            state[param][key] = states.moment(key, value.dtype).at_rest(piece.span, value.shape)
            if key not in views or not shares_storage(value, views[key]):
                yield key, piece.span, value


class Updater:
    """Steps the user's optimizer on units."""

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit], ledger: Ledger) -> None:
        self.optimizer = optimizer
        self._ledger = ledger
        self._units = list(units)
        self._pieces = PieceOptimizer(optimizer, units, ledger)
        self._is_fused = self._pieces.is_fused
        self._frozen: dict[str, int] = {}
        self._has_thawed = False
        self._worker: HostWorker | None = None
        self._overflow: torch.Tensor | None = None
        count = len(optimizer.param_groups)
        self._params = {
            unit.name: [
                [piece.param for piece in unit.weights.pieces if piece.group == index] for index in range(count)
            ]
            for unit in units
        }

    def call_pre_hooks(self) -> None:
        """Call the user's hooks before a step, while `p.grad` still refuses to be used: what a hook did to it would
        have no effect."""
        for hook in (*_global_optimizer_pre_hooks.values(), *self.optimizer._optimizer_step_pre_hooks.values()):
            hook(self.optimizer, (), {})

    def begin(self, overflow: torch.Tensor | None) -> bool:
        """Before the units of a step; returns whether to skip it.

        Fused kernels skip by themselves where `overflow` holds on the device. Other kernels, and the first step of any
        parameter, which makes its state, are skipped here, which waits for the device.
        """
        before, self._overflow = self._frozen, None
        self._frozen = {unit.name: count for unit in self._units if (count := count_frozen(unit))}
        self._has_thawed |= any(self._frozen.get(name, 0) < count for name, count in before.items())
        if overflow is None:
            return False
        if self._is_fused and self._pieces.has_state and not self._has_thawed:
            self._overflow = overflow
            self.optimizer.found_inf = overflow.to(torch.float32)  # type: ignore[attr-defined]  # read by fused kernels
            return False
        skips = bool(overflow.item())
        self._has_thawed &= skips
        return skips

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
        """Update the owned elements of a batch from its reduced gradients, multiplied by `coefficient`."""
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
        with mark("update", *[unit.name for unit in units]):
            try:
                for unit in units:
                    for all_params, own in zip(params, self._params[unit.name], strict=True):
                        all_params += own
                    casts.append(self._account_cast(unit))
                    _give_grads(unit, coefficient)
                    if unit.name in self._frozen:
                        frozen.append(Frozen(unit, self.optimizer))
                self._pieces.step(params, self.optimizer.param_groups)
                for unit in self._pieces.unaccounted(units):  # while the gradients exist: the first step makes states
                    if any(piece.param.grad is not None for piece in unit.weights.pieces):
                        self._pieces.account_for(unit)
                for each in frozen:
                    each.restore()
            finally:
                for own in params:
                    for param in own:
                        param.grad = None
                for entry, size_bytes in casts:
                    self._ledger.remove(entry, size_bytes)
            for unit in units:
                if not unit.plan.cast_bytes:
                    unit.grads.clear()

    def _account_cast(self, unit: Unit) -> tuple[Entry, int]:
        """Enter into the ledger what gradients in fp32 take in addition to those in 16 bits."""
        entry, cast_bytes = Entry(Kind.WORK, unit.name, Tier.DEVICE), unit.plan.cast_bytes
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
    if unit.plan.cast_bytes:
        unit.grads.clear()


def _in_batches(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    for batch in update_batches([unit.plan.update_sizes for unit in units]):
        yield units[batch.start : batch.stop]
