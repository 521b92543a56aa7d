"""The gathers of a pass in one order on all ranks, whichever units each of them enters.

A rank cannot know what the others' data make them do. So the order of a pass (forward, evaluation or backward) is
agreed on once and kept to: in the first pass of its kind every gather is a small meeting, in which each rank says which
unit it wants next, and all that are wanted are gathered in the order of the units. From then on nothing is asked. A
rank that goes to a unit first takes part in the gathers before it that it passes over, and at the end of the pass in
those that are left. Gathers ahead are those that come next.

Members of one container (experts, layers) stand for each other: one that nobody entered in the first pass has its place
in the order too. Any other unit that is entered later is gathered out of turn, which works if all ranks do so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from shardwise.comm.comm import Comm
from shardwise.unit.unit import Traffic, Unit
from shardwise.unit.weights import WeightsState

_NOTHING = -1


class GatherOrder:
    """The order of the gathers in one kind of pass."""

    def __init__(self, name: str, units: Sequence[Unit], containers: Collection[str], comm: Comm) -> None:
        self._name = name
        self._units = list(units)
        self._containers = containers
        self._comm = comm
        self._is_backward = name == "backward"
        self._agreed: list[Unit] | None = None
        self._learned: list[Unit] = []
        self._position = 0
        self._resident: set[str] = set()
        self._ahead: list[Unit] = []
        self._passed: list[Unit] = []

    def begin(self, resident: Collection[str]) -> None:
        """A pass begins, in which the `resident` units are gathered already, on all ranks."""
        self._position = 0
        self._learned = []
        self._ahead = []
        self._passed = []
        self._resident = set(resident)

    def gather(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        """Start to gather a unit that is about to be used, in its turn, and those `ahead` whose turn comes next."""
        if unit in self._passed:
            self._passed.remove(unit)
        self._pass_over(unit)
        if unit.weights.state is WeightsState.RELEASED:
            if self._agreed is None:
                self._meet(unit)
            else:
                self._go_to(unit, self._agreed)
        for other in ahead:
            if other.weights.state is WeightsState.RELEASED and self._is_next(other):
                self._position += 1
                self._ahead.append(other)
                other.weights.gather()

    def passes(self, unit: Unit) -> bool:
        """Take part in the gather of a unit that this rank does not enter, if its turn has come; says whether it has.

        Other ranks reduce the unit after they have gathered it, and wait for this rank's part in both.
        """
        if self._agreed is None:
            return unit in self._learned
        turn = self._turn_of(unit, self._agreed)
        if turn is not None:
            if any(_is_to_come(other) for other in self._agreed[self._position : turn]):
                return False
            self._pass_to(turn + 1, self._agreed)
        return True

    def finish(self, stays: Collection[Unit], between: Callable[[], None]) -> bool:
        """Take part in what is left, and release all but what `stays`. Says whether the order was agreed before.

        `between` is called whenever another rank may have come further.
        """
        was_agreed = self._agreed is not None
        if self._agreed is not None:
            self._pass_to(len(self._agreed), self._agreed, stays)
        else:
            while self._meet(None):
                between()
            self._agreed = self._with_siblings(self._learned)
        # A backward comes to rest, and releases everything, when it has reduced what is left: the plan counts on it.
        for unit in self._units if not self._is_backward else ():
            if not (was_agreed and unit in stays):
                unit.weights.release()
        return was_agreed

    # In an agreed order

    def _go_to(self, unit: Unit, agreed: list[Unit]) -> None:
        turn = self._turn_of(unit, agreed)
        if turn is None:
            if unit not in agreed:
                agreed.insert(self._position, unit)
                self._position += 1
        else:
            self._pass_to(turn, agreed)
            self._position = turn + 1
        unit.weights.gather()

    def _turn_of(self, unit: Unit, agreed: list[Unit]) -> int | None:
        """Where the next gather of a unit stands. That of a resident one is left out."""
        turns = [turn for turn in range(self._position, len(agreed)) if agreed[turn] is unit]
        if unit.name in self._resident:
            turns = turns[1:]
        return turns[0] if turns else None

    def _is_next(self, unit: Unit) -> bool:
        if self._agreed is None:
            return False
        self._skip_residents(self._agreed)
        return self._position < len(self._agreed) and self._agreed[self._position] is unit

    def _skip_residents(self, agreed: list[Unit]) -> None:
        while self._position < len(agreed) and agreed[self._position].name in self._resident:
            self._resident.remove(agreed[self._position].name)
            self._position += 1

    def _pass_to(self, turn: int, agreed: list[Unit], stays: Collection[Unit] = ()) -> None:
        """Take part in the gathers before `turn`, for the sake of other ranks."""
        while True:
            self._skip_residents(agreed)
            if self._position >= turn:
                return
            self._take_part(agreed[self._position], stays)
            self._position += 1

    def _take_part(self, unit: Unit, stays: Collection[Unit] = ()) -> None:
        """Gather for others. What is gathered here already may be in use, and its release is not ours."""
        was_released = unit.weights.state is WeightsState.RELEASED
        unit.weights.gather_again()
        if was_released and unit not in stays:
            self._let_pass(unit)

    def _let_pass(self, unit: Unit) -> None:
        """Keep a unit that others wanted for a moment: this rank may be about to enter it, only in another order."""
        self._passed.append(unit)
        # In the first pass nobody could ask for it again while others wait for a reduction: all are kept.
        while len(self._passed) > 1 and self._agreed is not None:
            self._passed.pop(0).weights.release()

    def _pass_over(self, unit: Unit) -> None:
        """What was gathered ahead and comes before `unit` is not entered after all."""
        if unit in self._ahead or unit.weights.state is WeightsState.RELEASED:
            while self._ahead and (other := self._ahead.pop(0)) is not unit:
                self._let_pass(other)

    # In the first pass

    def _meet(self, wanted: Unit | None) -> bool:
        """Gather what any rank wants; says whether there was anything."""
        mine = self._units.index(wanted) if wanted is not None else _NOTHING
        number = torch.tensor([mine], device=self._comm.device)
        told = self._comm.share(number, f"what the {self._name} gathers next", channel="gather")
        numbers = sorted(
            {number for number in told.flatten().tolist() if number != _NOTHING}, reverse=self._is_backward
        )
        for index in numbers:
            self._learned.append(self._units[index])
            if index == mine:
                self._units[index].weights.gather()
            else:
                self._take_part(self._units[index])
        return bool(numbers)

    def _with_siblings(self, learned: list[Unit]) -> list[Unit]:
        """`learned`, and beside them the members of their containers that nobody entered."""
        agreed = list(learned)
        used = {self._container(unit) for unit in learned} - {None}
        absent = [unit for unit in self._units if unit not in agreed and self._container(unit) in used]
        for unit in absent:
            family = [other for other in self._units if self._container(other) == self._container(unit)]
            known = [other for other in family if other in agreed]
            before = [other for other in known if other.number < unit.number]
            turn = agreed.index(before[-1] if before else known[0])
            agreed.insert(turn + (bool(before) != self._is_backward), unit)
        return agreed

    def _container(self, unit: Unit) -> str | None:
        """The path of the list or dictionary of modules that a unit's first module is a member of."""
        path = unit.spec.runs[0][0] if unit.spec.runs and unit.spec.runs[0] else ""
        parent = path.rpartition(".")[0]
        return parent if path and parent in self._containers else None


def _is_to_come(unit: Unit) -> bool:
    """Whether the backward has yet to reach a unit."""
    traffic = unit.traffic
    return traffic != Traffic() and not traffic.is_done and unit.weights.state is WeightsState.RELEASED


class GatherOrders:
    """The courses of one model's passes, and what is gathered between them. Where there is nobody to agree with, or
    nothing is gathered, every gather is as it is asked for."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str]) -> None:
        sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        kinds = ("forward", "evaluation", "backward") if sharded and sharded[0].comm.is_checked else ()
        self._courses = {kind: GatherOrder(kind, sharded, containers, sharded[0].comm) for kind in kinds}
        self._course: GatherOrder | None = None
        self._resident: set[str] = set()

    def begin(self, kind: str) -> None:
        """A pass begins."""
        self._course = self._courses.get(kind)
        if self._course is not None:
            self._course.begin(self._resident)
        self._resident = set()

    def gather(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        """Start to gather a unit that is about to be used, and those `ahead` of it."""
        if self._course is not None:
            self._course.gather(unit, ahead)
            return
        unit.weights.gather()
        for other in ahead:
            other.weights.gather()

    def passes(self, unit: Unit) -> bool:
        """Whether the gather of a unit that this rank does not enter is behind it."""
        return self._course is None or self._course.passes(unit)

    def finish(self, stays: Collection[Unit] = (), between: Callable[[], None] = lambda: None) -> None:
        """The pass ends, and what `stays` is kept."""
        if self._course is not None and self._course.finish(stays, between):
            self._resident = {unit.name for unit in stays}
        self._course = None

    def drop(self) -> None:
        """The pass was broken off, or is over: everything is released."""
        self._course = None
        self._resident = set()
