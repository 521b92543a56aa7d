"""The order of units in passes that only compute, one after the other: the first unit follows the last.

Generating text is many forwards of the same units, so the next unit is known across the end of a pass: the units that
the next pass begins with are gathered while this one ends. Each unit is gathered again in each pass, except those that
stay gathered throughout; they are locked (see `InferenceMode`).

With one rank, a window of units ahead of the one in use moves along the recorded order. With several, the gathers are
collectives in an agreed order (see `gathers`), and every rank has issued the same ones when a pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import nn

from shardwise.schedule.gathers import GatherOrder, GatherOrders, Gathers
from shardwise.schedule.hooks import containers
from shardwise.schedule.order import Order, Prefetch
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState


class CyclicOrder(Order):
    """The order in which passes without gradients enter the units. Several ranks agree on it after the first pass."""

    learns_from_evaluation = True

    def __init__(self, units: Sequence[Unit], moving: Collection[Unit], ahead: int) -> None:
        """`moving` are those of the units that are gathered in each pass."""
        self._moving = set(moving)
        super().__init__(units, Prefetch(ahead))

    def record(self, entered: Sequence[Unit]) -> None:
        is_first = not self._recorded
        super().record(entered)
        if is_first:
            self.agree()

    def _following(self, entered: Sequence[Unit], index: int) -> Sequence[Unit]:
        return [unit for unit in (*entered[index + 1 :], *entered[:index]) if unit in self._moving]


class CyclicGatherOrder(GatherOrder):
    """The agreed order of gathers, of which the first `ahead` are issued before the pass begins that they are for."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str], ahead: int) -> None:
        super().__init__("pass", units, containers, units[0].comm)
        self._ahead = ahead

    @property
    def first(self) -> list[Unit]:
        """What the next pass begins with: different units, whose gathers are issued ahead of it."""
        agreed = self._agreed or []
        count = next((n for n in range(len(agreed)) if agreed[n] in agreed[:n]), len(agreed))
        return agreed[: min(count, self._ahead)]

    def _is_next(self, unit: Unit) -> bool:
        if self._agreed is None or self._position < len(self._agreed):
            return super()._is_next(unit)
        turn = self._position - len(self._agreed)
        return self.first[turn : turn + 1] == [unit]

    def finish(self, keep: Collection[Unit], between: Callable[[], None]) -> bool:
        done = max(0, self._position - len(self._agreed)) if self._agreed is not None else 0
        super().finish(self.first[:done], between)
        for unit in self.first[done:]:
            unit.weights.gather()
        return True


class CyclicGatherOrders(GatherOrders):
    """Gathers in passes that only compute."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str], ahead: int) -> None:
        super().__init__((), containers)
        if units and units[0].comm.is_checked:
            self._orders = {"evaluation": CyclicGatherOrder(units, containers, ahead)}
        self._window: Sequence[Unit] = ()

    def begin(self, kind: str) -> None:
        if kind != "evaluation":
            raise RuntimeError(
                f"a {kind} with gradients inside engine.inference(), where weights are only read: call it after the "
                "`with` block, or evaluate under torch.no_grad()"
            )
        super().begin(kind)

    def gather(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        if self._current is None and ahead is not self._window:
            # What was prefetched and is not entered after all would otherwise take memory until its next use.
            for other in self._window:
                if other is not unit and other not in ahead and other.weights.state is WeightsState.GATHERING:
                    other.weights.release()
            self._window = ahead
        super().gather(unit, ahead)

    def finish(self, keep: Collection[Unit] = (), between: Callable[[], None] = lambda: None) -> None:
        order = self._current
        super().finish(keep, between)
        self._kept = {unit.name for unit in order.first} if isinstance(order, CyclicGatherOrder) else set()

    def drop(self) -> None:
        super().drop()
        self._window = ()


class InferenceMode:
    """Between `begin` and `end`, passes only compute, one after the other."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], gathers: Gathers) -> None:
        self._model = model
        self._units = units
        self._gathers = gathers
        self._for_training: tuple[Order, GatherOrders] | None = None
        self._kept: list[Unit] = []

    def begin(self, keeps: Sequence[Unit], ahead: int) -> None:
        """The units of `keeps` stay gathered; the others are gathered up to `ahead` before their use, across the end of
        a pass. A collective."""
        gathers = self._gathers
        gathers.drop()
        self._kept = [unit for unit in gathers.sharded if unit in keeps]
        for unit in self._kept:
            unit.weights.lock()
        moving = [unit for unit in gathers.sharded if unit not in self._kept]
        self._for_training = gathers.order, gathers.orders
        gathers.order = CyclicOrder(self._units, moving, ahead)
        gathers.orders = CyclicGatherOrders(moving, containers(self._model), ahead)

    def end(self) -> None:
        """Release what stayed gathered, and what was gathered ahead for a next pass."""
        if self._for_training is not None:
            (self._gathers.order, self._gathers.orders), self._for_training = self._for_training, None
            while self._kept:
                self._kept.pop().weights.unlock()
            self._gathers.release_all()
