"""Which weights are gathered when: for a unit in use and those after it, in one order on all ranks.

A rank cannot know which units the other ranks' data will use. So the order of the gathers of a pass (forward,
evaluation or backward) is agreed on once and kept. In the first pass of its kind the ranks meet before every gather:
each says which unit it needs next, and all of these are gathered in the order of the units. From then on nothing is
exchanged. A rank that needs a unit first takes part in the gathers that come before it, and at the end of the pass in
those that are left. Prefetches are the gathers that come next.

Members of one container (experts, layers) stand for each other: one that no rank entered in the first pass has its
place in the order too. Any other unit that is entered later is gathered out of turn, which works if all ranks do so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.profiling import Clock
from shardwise.schedule.hooks import containers
from shardwise.schedule.order import Prefetch, UnitOrder
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState

_NOTHING = -1


class GatherOrder:
    """The order of the gathers in forwards, in evaluations or in backwards: `name` says in which."""

    def __init__(self, name: str, units: Sequence[Unit], containers: Collection[str], comm: Comm) -> None:
        self._name = name
        self._units = list(units)
        self._containers = containers
        self._comm = comm
        self._is_backward = name == "backward"
        self._is_agreed = False
        self._agreed: list[Unit] = []
        self._recorded: list[Unit] = []
        self._position = 0
        self._kept: set[str] = set()
        self._prefetched: list[Unit] = []
        self._passed: list[Unit] = []

    def begin(self, kept: Collection[str]) -> None:
        """A pass begins, for which the `kept` units are gathered already, on all ranks."""
        self._position = 0
        self._recorded = []
        self._prefetched = []
        self._passed = []
        self._kept = set(kept)

    def gather(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        """Start to gather a unit that is about to be used, in its turn, and those `ahead` whose turn comes next."""
        if unit in self._passed:
            self._passed.remove(unit)
        self._skip_prefetched(unit)
        if unit.weights.state is WeightsState.RELEASED:
            if self._is_agreed:
                self._go_to(unit)
            else:
                self._meet(unit)
        for other in ahead:
            if other.weights.state is WeightsState.RELEASED and self._is_next(other):
                self._position += 1
                self._prefetched.append(other)
                other.weights.gather()

    def passes(self, unit: Unit, is_to_come: Callable[[Unit], bool]) -> bool:
        """Take part in the gather of a unit that this rank does not enter, once its turn is reached; returns whether
        that gather is over.

        Other ranks reduce the unit after they have gathered it, and wait for this rank in both.
        """
        if not self._is_agreed:
            return unit in self._recorded
        turn = self._turn_of(unit)
        if turn is not None:
            if any(is_to_come(other) for other in self._agreed[self._position : turn]):
                return False
            self._pass_to(turn + 1)
        return True

    def finish(self, keep: Collection[Unit], between: Callable[[], None]) -> bool:
        """Take part in what is left, and release all units but those to `keep`; returns whether the order was agreed.

        `between` is called whenever another rank may have made progress.
        """
        was_agreed = self._is_agreed
        if was_agreed:
            self._pass_to(len(self._agreed), keep)
        else:
            while self._meet(None):
                between()
            self._is_agreed, self._agreed = True, self._with_siblings(self._recorded)
        # A backward releases everything when it has reduced what is left: the plan counts on it.
        for unit in self._units if not self._is_backward else ():
            if not (was_agreed and unit in keep):
                unit.weights.release()
        return was_agreed

    # In an agreed order

    def _go_to(self, unit: Unit) -> None:
        turn = self._turn_of(unit)
        if turn is None:
            if unit not in self._agreed:
                self._agreed.insert(self._position, unit)
                self._position += 1
        else:
            self._pass_to(turn)
            self._position = turn + 1
        unit.weights.gather()

    def _turn_of(self, unit: Unit) -> int | None:
        """The index of the next gather of a unit, if there is one. A kept unit skips its first."""
        turns = [turn for turn in range(self._position, len(self._agreed)) if self._agreed[turn] is unit]
        if unit.name in self._kept:
            turns = turns[1:]
        return turns[0] if turns else None

    def _is_next(self, unit: Unit) -> bool:
        self._skip_kept()
        return self._position < len(self._agreed) and self._agreed[self._position] is unit

    def _skip_kept(self) -> None:
        while self._position < len(self._agreed) and self._agreed[self._position].name in self._kept:
            self._kept.remove(self._agreed[self._position].name)
            self._position += 1

    def _pass_to(self, turn: int, keep: Collection[Unit] = ()) -> None:
        """Take part in the gathers before `turn`, which other ranks may need."""
        while True:
            self._skip_kept()
            if self._position >= turn:
                return
            self._take_part(self._agreed[self._position], keep)
            self._position += 1

    def _take_part(self, unit: Unit, keep: Collection[Unit] = ()) -> None:
        """Gather for other ranks. A unit that is gathered here already may be in use: it is not released."""
        was_released = unit.weights.state is WeightsState.RELEASED
        unit.weights.gather_for_others()
        if was_released and unit not in keep:
            self._keep_briefly(unit)

    def _keep_briefly(self, unit: Unit) -> None:
        """Keep a unit that others need for a moment: this rank may be about to enter it, only in another order."""
        self._passed.append(unit)
        # In the first pass no rank could ask for it again while others wait for a reduction: all are kept.
        while len(self._passed) > 1 and self._is_agreed:
            self._passed.pop(0).weights.release()

    def _skip_prefetched(self, unit: Unit) -> None:
        """Release the prefetched units before `unit`, which this rank has skipped."""
        if unit in self._prefetched or unit.weights.state is WeightsState.RELEASED:
            while self._prefetched and (other := self._prefetched.pop(0)) is not unit:
                self._keep_briefly(other)

    # In the first pass

    def _meet(self, wanted: Unit | None) -> bool:
        """Gather what any rank needs; returns whether there was anything."""
        mine = self._units.index(wanted) if wanted is not None else _NOTHING
        number = torch.tensor([mine], device=self._comm.device)
        shared = self._comm.share(number, f"what the {self._name} gathers next", channel="gather")
        numbers = sorted(
            {number for number in self._comm.read(shared).flatten().tolist() if number != _NOTHING},
            reverse=self._is_backward,
        )
        for index in numbers:
            self._recorded.append(self._units[index])
            with self._comm.announced():
                if index == mine:
                    self._units[index].weights.gather()
                else:
                    self._take_part(self._units[index])
        return bool(numbers)

    def _with_siblings(self, recorded: list[Unit]) -> list[Unit]:
        """`recorded`, and next to them the units in members of their containers that no rank entered."""
        agreed = list(recorded)
        for unit in [unit for unit in self._units if unit not in agreed]:
            known = [other for other in self._family(unit, recorded) if other in agreed]
            if known:
                before = [other for other in known if other.number < unit.number]
                turn = agreed.index(before[-1] if before else known[0])
                agreed.insert(turn + (bool(before) != self._is_backward), unit)
        return agreed

    def _family(self, unit: Unit, recorded: list[Unit]) -> list[Unit]:
        """The units of the innermost list or dictionary of modules that was entered, but not in the member that this
        unit lies in; none if there is no such container."""
        member = _path(unit)
        while member:
            container = member.rpartition(".")[0]
            if container in self._containers and not any(_lies_in(other, member) for other in recorded):
                family = [other for other in self._units if _lies_in(other, container)]
                if not set(recorded).isdisjoint(family):
                    return family
            member = container
        return []


def _path(unit: Unit) -> str:
    """The path of a unit's first module."""
    runs = unit.spec.runs
    return runs[0][0] if runs and runs[0] else ""


def _lies_in(unit: Unit, module: str) -> bool:
    """Whether a unit's first module is that of the path `module`, or lies in it."""
    return not module or f"{_path(unit)}.".startswith(f"{module}.")


class GatherOrders:
    """The gather orders of one model's passes, and what stays gathered between them. With one rank, or with
    replicated weights, there is no order to keep."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str]) -> None:
        sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        names = ("forward", "evaluation", "backward") if sharded and sharded[0].comm.is_checked else ()
        self._orders = {name: GatherOrder(name, sharded, containers, sharded[0].comm) for name in names}
        self._current: GatherOrder | None = None
        self._kept: set[str] = set()
        self.all_locked = False
        """Whether everything stays gathered on all ranks, so that passes have nothing to gather."""

    def begin(self, name: str) -> None:
        """A pass begins."""
        self._current = self._orders.get(name) if not self.all_locked else None
        if self._current is not None:
            self._current.begin(self._kept)
        self._kept = set()

    def gather(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        """Start to gather a unit that is about to be used, and those `ahead` of it."""
        if self._current is not None:
            self._current.gather(unit, ahead)
            return
        unit.weights.gather()
        for other in ahead:
            other.weights.gather()

    def passes(self, unit: Unit, is_to_come: Callable[[Unit], bool]) -> bool:
        """Whether the gather of a unit that this rank does not enter is over."""
        return self._current is None or self._current.passes(unit, is_to_come)

    def finish(self, keep: Collection[Unit] = (), between: Callable[[], None] = lambda: None) -> None:
        """The pass ends; the units to `keep` stay gathered."""
        if self._current is not None and self._current.finish(keep, between):
            self._kept = {unit.name for unit in keep}
        self._current = None

    def drop(self) -> None:
        """The pass is over, or an exception ended it: everything is released."""
        self._current = None
        self._kept = set()


class Gathers:
    """Gathers and releases the weights of one model's units.

    sharded        the units that are gathered and released; the others' weights are replicated
    unit_order     that of the units in its passes: what is prefetched, what stays gathered, what is reduced first
    gather_orders  those of the gathers in forwards, evaluations and backwards

    The two orders are those of training, except within an `InferenceMode` (see `inference`).
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], prefetch: Prefetch, clock: Clock) -> None:
        self.sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        self._clock = clock
        self.unit_order = UnitOrder(units, prefetch)
        self.gather_orders = GatherOrders(units, containers(model))
        self._locked: list[Unit] = []

    def gather(self, unit: Unit, ahead: Sequence[Unit] = ()) -> None:
        """Gather a unit's weights; the gathers of those `ahead` are issued before it waits."""
        self.gather_orders.gather(unit, ahead)
        if unit.weights.is_read:
            unit.weights.be_plain()
        if unit.weights.state is not WeightsState.GATHERED:
            with self._clock.phase("wait for gather"):
                unit.weights.wait_gather()

    def drop(self) -> None:
        """The pass is over, or an exception ended it: release what rests sharded."""
        self.gather_orders.drop()
        self.release_all()

    def release_all(self) -> None:
        """Release what rests sharded."""
        for unit in self.sharded:
            unit.weights.release()

    def lock(self, unit: Unit) -> None:
        """Keep a unit gathered until `unlock_all`."""
        if unit.weights.policy.weights_sharded and unit not in self._locked:
            self._locked.append(unit)
            unit.weights.lock()

    def lock_all(self) -> None:
        """Gather all weights and keep them until `unlock_all`, between passes. On all ranks."""
        for unit in self.sharded:
            self.gather(unit)
            self.lock(unit)
        self.gather_orders.all_locked = True

    def unlock_all(self) -> None:
        """Release what was locked."""
        self.gather_orders.all_locked = False
        while self._locked:
            self._locked.pop().weights.unlock()

    @contextlib.contextmanager
    def all_gathered(self) -> Iterator[None]:
        """Between passes: within it all weights are gathered. On all ranks."""
        for unit in self.sharded:
            self.gather(unit)
        try:
            yield
        finally:
            self.release_all()
