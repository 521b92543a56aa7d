"""The reduce-scatters of one backward, in the order that all ranks keep: one is in flight while the next is packed."""

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
        self._in_flight: Unit | None = None

    @property
    def outstanding(self) -> int:
        """How many units wait for their turn."""
        return len(self._waiting)

    def begin(self, waiting: list[Unit], reduces: bool) -> None:
        """These units are due from now on, in this order; unless it `reduces`, they only collect local gradients."""
        self._waiting, self._reduces = waiting, reduces

    def advance(self, is_ready: Callable[[Unit], bool]) -> None:
        """Continue as far as the next unit is ready."""
        while self._waiting and is_ready(self._waiting[0]):
            self._reduce(self._waiting.pop(0))

    def reduce_rest(self) -> None:
        """Reduce all that is left, ready or not, and wait for the last."""
        for unit in self._waiting:
            self._reduce(unit)
        self.finish()

    def start(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients, once the one before has arrived."""
        self.finish()
        unit.grads.start_reduce()
        self._in_flight = unit
        if not unit.grads.reduce_plan.overlap:
            self.finish()

    def finish(self) -> None:
        """Wait for the unit in flight."""
        unit, self._in_flight = self._in_flight, None
        if unit is not None:
            if unit.grads.is_in_flight:
                with self._clock.phase("finish reduce"):
                    unit.grads.finish_reduce()
            self._on_reduced(unit)

    def forget(self) -> None:
        """The unit in flight was abandoned."""
        self._in_flight = None

    def _reduce(self, unit: Unit) -> None:
        if self._reduces:
            self.start(unit)
        else:
            unit.grads.collect()
