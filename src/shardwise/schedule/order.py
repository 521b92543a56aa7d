"""The order of units: what is prefetched, what stays gathered, and one order of collectives on all ranks.

A rank cannot know what the others' data make them do, so two orders are agreed on.

- *Reductions* (`Order`): the order in which a forward entered the units. One rank follows its own forwards. Several
  exchange what they recorded every hundredth backward, and keep one merged order. It also decides what is prefetched
  and what stays gathered between forward and backward.
- *Gathers* (`GatherOrder`), of sharded weights: the order of a pass (forward, evaluation or backward) is agreed on once
  and kept. In the first pass of its kind the ranks meet before every gather: each says which unit it needs next, and
  all of these are gathered in the order of the units. From then on nothing is exchanged. A rank that needs a unit first
  takes part in the gathers that come before it, and at the end of the pass in those that are left. Prefetches are the
  gathers that come next.

Members of one container (experts, layers) stand for each other: one that no rank entered in the first pass has its
place in the order too. Any other unit that is entered later is gathered out of turn, which works if all ranks do so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import Comm
from shardwise.config.sections import Runtime
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState

_AGREE_EVERY = 100
"""Backwards that reduce, between two exchanges of the recorded orders."""


@dataclass(frozen=True)
class Prefetch:
    """How far gathers run ahead of use: so many units, so many bytes of them, and so many with the one in use."""

    units: int = 1
    ahead_bytes: int | None = None
    gathered_bytes: int | None = None

    @classmethod
    def of(cls, runtime: Runtime) -> Prefetch:
        return cls(runtime.prefetch, runtime.prefetch_bytes, runtime.max_gathered_bytes)

    def choose(self, unit: Unit, following: Sequence[Unit]) -> list[Unit]:
        """Those of the `following` units, without repetitions, that may be gathered while `unit` computes."""
        chosen: list[Unit] = []
        total = 0
        for other in dict.fromkeys(following):
            if other is unit or not other.weights.policy.weights_sharded:
                continue
            total += other.weights.full_bytes
            if len(chosen) == self.units or not self._allows(total, unit.weights.full_bytes):
                break
            chosen.append(other)
        return chosen

    def _allows(self, ahead: int, current: int) -> bool:
        return (self.ahead_bytes is None or ahead <= self.ahead_bytes) and (
            self.gathered_bytes is None or ahead + current <= self.gathered_bytes
        )


def merged(sequences: Sequence[Sequence[int]]) -> list[int]:
    """One sequence of everything that is in any of them: the first, with the others' items inserted, each behind what
    it follows in its own.

    >>> merged([[0, 1, 3], [0, 2, 3, 4]])
    [0, 2, 1, 3, 4]
    """
    whole: list[int] = []
    for sequence in sequences:
        place = 0
        for item in sequence if whole else ():
            if item not in whole:
                whole.insert(place, item)
            place = whole.index(item) + 1
        whole = whole or list(sequence)
    return whole


class Order:
    """The order in which a forward entered the units; at first, that of registration.

    One rank follows its own forwards. Several keep an order that all of them have: the ranks' data may make them enter
    other units, and reduce-scatters must be issued in one order.
    """

    learns_from_evaluation = False
    """Whether passes without gradients are recorded."""

    def __init__(self, units: Sequence[Unit], prefetch: Prefetch) -> None:
        self._all = list(units)
        self._prefetch = prefetch
        self._comm = units[0].comm if units and units[0].comm.is_checked else None
        self._agreements = 0
        self._recorded: list[Unit] = []
        self._entered: list[Unit] = []
        self.forward: list[Unit] = []
        self.last: Unit | None = None
        self.backward: list[Unit] = []
        self._after: list[list[Unit]] = []
        self._before: dict[str, list[Unit]] = {}
        self._stays_from: dict[str, int] = {}
        self._follow(self._all)

    def record(self, entered: Sequence[Unit]) -> None:
        """Take the entries of a forward of this rank, in order and with repetitions."""
        self._recorded = list(entered)
        if self._comm is None:
            self._follow(self._recorded)

    def agree(self) -> None:
        """Before reductions: now and then, make one order of those that the ranks recorded. A collective."""
        if self._comm is not None and self._agreements % _AGREE_EVERY == 0:
            numbers = [self._all.index(unit) for unit in self._recorded]
            everyone = self._comm.share_object(numbers, "the order of units")
            self._follow([self._all[number] for number in merged(everyone)])
        self._agreements += 1

    def _follow(self, entered: Sequence[Unit]) -> None:
        if self._entered == list(entered):
            return
        self._entered = list(entered)
        seen = list(dict.fromkeys(entered))
        unseen = [unit for unit in self._all if unit not in seen]
        self.last = seen[-1] if seen else None
        self.forward = seen + unseen
        self.backward = unseen + seen[::-1]
        self._after = [
            self._prefetch.choose(unit, self._following(entered, index)) for index, unit in enumerate(entered)
        ]
        first = {unit.name: index for index, unit in reversed(list(enumerate(entered)))}
        self._before = {unit.name: self._prefetch.choose(unit, entered[: first[unit.name]][::-1]) for unit in seen}
        last = {unit.name: index for index, unit in enumerate(entered)}
        end = list(entered[-1:])
        self._stays_from = {unit.name: last[unit.name] for unit in end + [u for e in end for u in self.before(e)]}

    def _following(self, entered: Sequence[Unit], index: int) -> Sequence[Unit]:
        """What comes after the entry at `index`."""
        return entered[index + 1 :]

    def place(self, unit: Unit, before: int) -> int:
        """The index at which a unit is entered next after `before`; `before` if the order has no such entry."""
        for index in range(before + 1, len(self._entered)):
            if self._entered[index] is unit:
                return index
        return before

    @property
    def staying(self) -> list[Unit]:
        """The units that are not released between forward and backward."""
        return [unit for unit in self._all if unit.name in self._stays_from]

    def after(self, index: int) -> Sequence[Unit]:
        """The units to gather while the one entered at `index` computes its forward."""
        return self._after[index] if 0 <= index < len(self._after) else ()

    def before(self, unit: Unit) -> Sequence[Unit]:
        """The units to gather while `unit` computes its backward."""
        return self._before.get(unit.name, ())

    def is_needed_next(self, unit: Unit, entered: int) -> bool:
        """Whether the backward begins with `unit`, or prefetches it at once, and `entered` entries bring no more of
        it: then it is in memory at the peak anyway, and releasing it would only send it once more."""
        return entered > self._stays_from.get(unit.name, entered)


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
            if self._agreed is None:
                self._meet(unit)
            else:
                self._go_to(unit, self._agreed)
        for other in ahead:
            if other.weights.state is WeightsState.RELEASED and self._is_next(other):
                self._position += 1
                self._prefetched.append(other)
                other.weights.gather()

    def passes(self, unit: Unit, is_to_come: Callable[[Unit], bool]) -> bool:
        """Take part in the gather of a unit that this rank does not enter, if its turn has come; returns whether so.

        Other ranks reduce the unit after they have gathered it, and wait for this rank in both.
        """
        if self._agreed is None:
            return unit in self._recorded
        turn = self._turn_of(unit, self._agreed)
        if turn is not None:
            if any(is_to_come(other) for other in self._agreed[self._position : turn]):
                return False
            self._pass_to(turn + 1, self._agreed)
        return True

    def finish(self, keep: Collection[Unit], between: Callable[[], None]) -> bool:
        """Take part in what is left, and release all units but those to `keep`; returns whether the order was agreed.

        `between` is called whenever another rank may have made progress.
        """
        was_agreed = self._agreed is not None
        if self._agreed is not None:
            self._pass_to(len(self._agreed), self._agreed, keep)
        else:
            while self._meet(None):
                between()
            self._agreed = self._with_siblings(self._recorded)
        # A backward releases everything when it has reduced what is left: the plan counts on it.
        for unit in self._units if not self._is_backward else ():
            if not (was_agreed and unit in keep):
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
        """The index of the next gather of a unit, if there is one. A kept unit skips its first."""
        turns = [turn for turn in range(self._position, len(agreed)) if agreed[turn] is unit]
        if unit.name in self._kept:
            turns = turns[1:]
        return turns[0] if turns else None

    def _is_next(self, unit: Unit) -> bool:
        if self._agreed is None:
            return False
        self._skip_kept(self._agreed)
        return self._position < len(self._agreed) and self._agreed[self._position] is unit

    def _skip_kept(self, agreed: list[Unit]) -> None:
        while self._position < len(agreed) and agreed[self._position].name in self._kept:
            self._kept.remove(agreed[self._position].name)
            self._position += 1

    def _pass_to(self, turn: int, agreed: list[Unit], keep: Collection[Unit] = ()) -> None:
        """Take part in the gathers before `turn`, which other ranks may need."""
        while True:
            self._skip_kept(agreed)
            if self._position >= turn:
                return
            self._take_part(agreed[self._position], keep)
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
        while len(self._passed) > 1 and self._agreed is not None:
            self._passed.pop(0).weights.release()

    def _skip_prefetched(self, unit: Unit) -> None:
        """Give up the prefetched units that come before `unit`: they are not entered after all."""
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
            {number for number in shared.flatten().tolist() if number != _NOTHING}, reverse=self._is_backward
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
        """`recorded`, and next to them the members of their containers that no rank entered."""
        agreed = list(recorded)
        used = {self._container(unit) for unit in recorded} - {None}
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


class GatherOrders:
    """The gather orders of one model's passes, and what stays gathered between them. With one rank, or with
    replicated weights, there is no order to keep."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str]) -> None:
        sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        kinds = ("forward", "evaluation", "backward") if sharded and sharded[0].comm.is_checked else ()
        self._orders = {kind: GatherOrder(kind, sharded, containers, sharded[0].comm) for kind in kinds}
        self._current: GatherOrder | None = None
        self._kept: set[str] = set()
        self.all_gathered = False
        """Whether everything stays gathered on all ranks, so that passes have nothing to gather."""

    def begin(self, kind: str) -> None:
        """A pass begins."""
        self._current = self._orders.get(kind) if not self.all_gathered else None
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
