"""The reductions of one backward, in the order that all ranks keep: one under way while the next is waited for."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.profiling import Clock
from shardwise.unit.unit import Unit


class Reductions:
    """Which units are still to be reduced, and the one that is being. `on_reduced` is told of each."""

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
        """From here on these are due, in this order; unless it `reduces`, they only collect what has arrived."""
        self._waiting, self._reduces = waiting, reduces

    def advance(self, is_ready: Callable[[Unit], bool]) -> None:
        """Go on, as far as the next one is ready."""
        while self._waiting and is_ready(self._waiting[0]):
            self._reduce(self._waiting.pop(0))

    def reduce_rest(self) -> None:
        """Take all that is left, ready or not, and wait for the last."""
        for unit in self._waiting:
            self._reduce(unit)
        self.finish()

    def start(self, unit: Unit) -> None:
        """Send a unit's gradients on their way, once the one before has arrived."""
        assert unit.grads is not None
        self.finish()
        unit.grads.start_reduce()
        self._in_flight = unit
        if not unit.grads.reduce_plan.overlap:
            self.finish()

    def finish(self) -> None:
        """Wait for the one under way."""
        unit, self._in_flight = self._in_flight, None
        if unit is not None:
            assert unit.grads is not None
            if unit.grads.is_in_flight:
                with self._clock.phase("finish reduce"):
                    unit.grads.finish_reduce()
            self._on_reduced(unit)

    def forget(self) -> None:
        """The one under way was given up."""
        self._in_flight = None

    def _reduce(self, unit: Unit) -> None:
        assert unit.grads is not None
        if self._reduces:
            self.start(unit)
        else:
            unit.grads.collect()
