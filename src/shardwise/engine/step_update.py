"""The update that ends a step: the optimizer on the shards of all units, and the new weights sent to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from shardwise.engine.failures import all_or_nothing
from shardwise.engine.residency import Budget
from shardwise.offload.context import OffloadContext
from shardwise.offload.offloaded_states import OffloadedStates, prefetch
from shardwise.optim import Updater
from shardwise.optim.clipping import Clip
from shardwise.profiling import Clock
from shardwise.schedule import Schedule
from shardwise.unit import Unit


class StepUpdate:
    """Updates the units of a schedule with final gradients, and prefetches offloaded states for it."""

    def __init__(
        self,
        updater: Updater,
        units: Sequence[Unit],
        schedule: Schedule,
        offload: OffloadContext,
        budget: Budget,
        clock: Clock,
    ) -> None:
        self._updater = updater
        self._units = units
        self._schedule = schedule
        self._offload = offload
        self._budget = budget
        self._clock = clock
        self._is_offloaded = self._has_offloaded()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._updater.optimizer

    def prefetch(self) -> None:
        """Fetch the states of the units that are updated first, as far as the backward has got."""
        if self._is_offloaded:
            prefetch(self._offload, self._streamed_states(), self._schedule.backward.reduced_part())

    def apply(self, clip: Clip, drop: Callable[[], None]) -> None:
        """Update the units and start the gathers of their new weights, without waiting. If it raises, `drop` drops the
        remaining gradients."""
        updater, units = self._updater, self._trainable()
        self._offload.begin_step()
        with self._clock.phase("update"), all_or_nothing(drop):
            if updater.begin(clip.overflow):
                for unit in units:
                    unit.grads.clear()
            else:
                for batch in updater.batches(units):
                    updater.update(batch, clip.coefficient)
                    for unit in batch:
                        unit.weights.refresh()
        self._offload.streams.drain()
        updater.finish()

    def spend_budget(self) -> None:
        """After a step: move states to the device that the memory budget has room for."""
        if self._budget.spend(self._trainable(), self._updater, self._offload.staging):
            self._is_offloaded = self._has_offloaded()

    def _trainable(self) -> list[Unit]:
        return [unit for unit in self._schedule.gathers.order.forward if unit.is_trainable]

    def _streamed_states(self) -> Iterator[OffloadedStates]:
        """The states that an update copies to the device, in its order."""
        for unit in self._schedule.gathers.order.forward:
            states = unit.states
            if isinstance(states, OffloadedStates) and states.is_streamed and not states.updates_on_host:
                yield states

    def _has_offloaded(self) -> bool:
        return any(unit.states.is_offloaded for unit in self._units)
