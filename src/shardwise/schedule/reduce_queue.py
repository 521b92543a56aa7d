"""The reduce-scatters of one backward, in the order that all ranks keep: one is in flight while the next is packed.

Where a unit is reduced in the node and then across nodes, the second is in flight beside the first of the next unit.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.profiling import Clock
from shardwise.unit import Unit


class ReduceQueue:
    """The units that are still to be reduced, and the one in flight. `on_reduced` is called with each."""

    def __init__(self, clock: Clock, on_reduced: Callable[[Unit], None]) -> None:
        self._clock = clock
        self._on_reduced = on_reduced
        self._waiting: list[Unit] = []
        self._reduces = False
        self._overlaps = True
        self._in_flight: list[Unit] = []

    @property
    def outstanding(self) -> int:
        """How many units wait for their turn."""
        return len(self._waiting)

    def begin(self, waiting: list[Unit], reduces: bool, overlaps: bool = True) -> None:
        """These units are due from now on, in this order; unless it `reduces`, they only collect gradients: this rank's
        own, or those of its node. Unless it `overlaps`, each is reduced before the gradients of the next arrive."""
        self._waiting, self._reduces, self._overlaps = waiting, reduces, overlaps

    def advance(self, is_ready: Callable[[Unit], bool]) -> None:
        """Continue as far as the next unit is ready."""
        while self._waiting and is_ready(self._waiting[0]):
            self._reduce(self._waiting.pop(0))

    def reduce_rest(self) -> None:
        """Reduce all that is left, ready or not, and wait for the last."""
        for unit in self._waiting:
            self._reduce(unit)
        self.finish()

    def start(self, unit: Unit, is_final: bool = True) -> None:
        """Start to reduce a unit's gradients, once those before have arrived."""
        self._finish_one_each()
        unit.grads.start_reduce(is_final)
        self._in_flight.append(unit)
        if not (self._overlaps and unit.grads.reduce_plan.overlap):
            self.finish()

    def finish(self) -> None:
        """Wait for the units in flight."""
        while self._in_flight:
            self._finish_one_each()

    def _finish_one_each(self) -> None:
        """Wait for one reduce-scatter of each unit in flight."""
        units, self._in_flight = self._in_flight, []
        for unit in units:
            if unit.grads.is_in_flight:
                with self._clock.phase("finish reduce"):
                    if not unit.grads.finish_reduce():
                        self._in_flight.append(unit)
                        continue
            if unit.grads.is_reduced:
                self._on_reduced(unit)

    def forget(self) -> None:
        """The units in flight were abandoned."""
        self._in_flight = []

    def _reduce(self, unit: Unit) -> None:
        if self._reduces or unit.grads.is_cut_by_node:
            self.start(unit, self._reduces)
        else:
            unit.grads.collect()
