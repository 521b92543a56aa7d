"""Which weights are gathered when: for a unit in use and those after it, in the order that all ranks keep.

In training the units follow `order`. Within `begin_inference` and `end_inference`, where passes only compute, they
follow `cycle`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from shardwise.profiling import Clock
from shardwise.schedule.cycle import CyclicGatherOrders, CyclicOrder
from shardwise.schedule.hooks import containers
from shardwise.schedule.order import GatherOrders, Order, Prefetch
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState


class Gathers:
    """Gathers and releases the weights of one model's units.

    order    that of the units in its passes: what is prefetched, what stays gathered, what is reduced first
    orders   those of the gathers, one for each kind of pass
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], prefetch: Prefetch, clock: Clock) -> None:
        self._units = units
        self._sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        self._clock = clock
        self._containers = containers(model)
        self.order = Order(units, prefetch)
        self.orders = GatherOrders(units, self._containers)
        self._for_training: tuple[Order, GatherOrders] | None = None
        self._kept: list[Unit] = []
        self._locked: list[Unit] = []

    def gather(self, unit: Unit, ahead: Sequence[Unit] = ()) -> None:
        """Gather a unit's weights; the gathers of those `ahead` are issued before it waits."""
        self.orders.gather(unit, ahead)
        if unit.weights.state is not WeightsState.GATHERED:
            with self._clock.phase("wait for gather"):
                unit.weights.wait_gather()

    def drop(self) -> None:
        """The pass is over, or an exception ended it: release what rests sharded."""
        self.orders.drop()
        self.release_all()

    def release_all(self) -> None:
        """Release what rests sharded."""
        for unit in self._sharded:
            unit.weights.release()

    def lock(self, unit: Unit) -> None:
        """Keep a unit gathered until `unlock_all`."""
        if unit.weights.policy.weights_sharded and unit not in self._locked:
            self._locked.append(unit)
            unit.weights.lock()

    def lock_all(self) -> None:
        """Gather all weights and keep them until `unlock_all`, between passes. On all ranks."""
        for unit in self._sharded:
            self.gather(unit)
            self.lock(unit)
        self.orders.all_gathered = True

    def unlock_all(self) -> None:
        """Release what was locked."""
        self.orders.all_gathered = False
        while self._locked:
            self._locked.pop().weights.unlock()

    @contextlib.contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Between passes: within it all weights are gathered. On all ranks."""
        for unit in self._sharded:
            self.gather(unit)
        try:
            yield
        finally:
            self.release_all()

    def begin_inference(self, keeps: Sequence[Unit], ahead: int) -> None:
        """From here to `end_inference`, passes only compute, one after the other: the units of `keeps` stay gathered,
        the others are gathered up to `ahead` before their use, across the end of a pass. A collective."""
        self.drop()
        self._kept = [unit for unit in self._sharded if unit in keeps]
        for unit in self._kept:
            unit.weights.lock()
        self._for_training = self.order, self.orders
        moving = [unit for unit in self._sharded if unit not in self._kept]
        self.order = CyclicOrder(self._units, moving, ahead)
        self.orders = CyclicGatherOrders(moving, self._containers, ahead)

    def end_inference(self) -> None:
        """Release what stayed gathered, and what was gathered ahead of a pass that does not come."""
        if self._for_training is not None:
            (self.order, self.orders), self._for_training = self._for_training, None
            while self._kept:
                self._kept.pop().weights.unlock()
            self.release_all()
