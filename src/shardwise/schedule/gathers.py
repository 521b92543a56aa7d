"""Which weights are gathered when: for a unit in use and those after it, in one order on all ranks.

A rank cannot know which units the other ranks' data will use. So the order of the gathers of a pass (forward,
evaluation or backward) is agreed on once and kept. In the first pass of its kind the ranks meet before every gather:
each says which unit it needs next, and all of these are gathered. At its end they merge the lists of what each of them
needed into one order. Where the lists leave that open, the order of the model's modules decides; for a backward it is
reversed, except among modules that a checkpoint recomputes together. From then on nothing is exchanged. A rank that
needs a unit first takes part in the gathers that come before it, and at the end of the pass in the rest. In a backward
it knows which of these units it will need itself, and keeps them. Prefetches are the gathers that come next.

Before a rank waits for a gather, it reduces the units that its backward has completed or skips; a skipped unit only
after all gathers up to that unit's. So a rank that is behind waits for gathers that all others have issued, provided
that what a backward needs before it completes a unit has its turn before that unit, or is reduced before it.

Members of one container (experts, layers) stand for each other: one that no rank entered in the first pass has its
place in the order too. Any other unit that is entered later is gathered out of turn, which works if all ranks do so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, takewhile

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.profiling import Clock
from shardwise.schedule.hooks import containers
from shardwise.schedule.order import Prefetch, UnitOrder, merged
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState

_NOTHING = -1


@dataclass(frozen=True)
class Demand:
    """What a rank knows of its own part in a pass. In a forward it knows nothing ahead.

    is_to_come  whether this rank will still use a unit
    advance     reduces what this rank has finished: other ranks may wait for that before they gather the next unit
    """

    is_to_come: Callable[[Unit], bool] = lambda unit: False
    advance: Callable[[], None] = lambda: None


UNKNOWN = Demand()


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
        self._needed: list[str] = []
        self._early: set[Unit] = set()  # gathered for other ranks before this one needs it
        self._recomputed: list[Unit] = []
        self._together: set[str] = set()
        self._position = 0
        self._kept: set[str] = set()
        self._prefetched: list[Unit] = []
        self._passed: list[Unit] = []
        self._demand = UNKNOWN

    def begin(self, kept: Collection[str], demand: Demand) -> None:
        """A pass begins, for which the `kept` units are gathered already, on all ranks."""
        self._demand = demand
        self._position = 0
        self._recorded = []
        self._needed = []
        self._early = set()
        self._recomputed = []
        self._together = set()
        self._prefetched = []
        self._passed = []
        self._kept = set(kept)

    def gather(self, unit: Unit, ahead: Sequence[Unit], recomputes: bool = False) -> None:
        """Start to gather a unit that is about to be used, in its turn, and those `ahead` whose turn comes next."""
        if not self._is_agreed:
            self._record(unit, recomputes)
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

    def passes(self, unit: Unit) -> bool:
        """Take part in the gather of a unit that this rank does not enter, once its turn is reached; returns whether
        that gather is over.

        Other ranks reduce the unit after they have gathered it, and wait for this rank in both.
        """
        if not self._is_agreed:
            return unit in self._recorded
        if unit in self._agreed[self._position :]:  # also if it is kept: others may need what comes before it
            turn = self._agreed.index(unit, self._position)
            if any(map(self._is_needed, self._agreed[self._position : turn])):
                return False
            self._pass_to(turn + 1)
        return True

    def finish(self, keep: Collection[Unit]) -> bool:
        """Take part in what is left, and release all but the units to `keep`; returns whether the order was agreed."""
        was_agreed = self._is_agreed
        if was_agreed:
            self._pass_to(len(self._agreed), keep, self._demand.advance)
        else:
            while self._meet(None):
                pass
            self._is_agreed, self._agreed = True, self._with_siblings(self._merged())
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
            self._pass_to(turn, between=self._demand.advance)
            self._position = max(self._position, turn + 1)  # `advance` may have passed this turn
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

    def _is_needed(self, unit: Unit) -> bool:
        return unit.weights.state is WeightsState.RELEASED and self._demand.is_to_come(unit)

    def _pass_to(self, turn: int, keep: Collection[Unit] = (), between: Callable[[], None] = lambda: None) -> None:
        """Take part in the gathers before `turn`, which other ranks may need."""
        while True:
            self._skip_kept()
            if self._position >= turn:
                return
            unit = self._agreed[self._position]
            self._position += 1  # before `between`, which may take part in further gathers
            self._take_part(unit, keep)
            between()

    def _take_part(self, unit: Unit, keep: Collection[Unit] = ()) -> None:
        """Gather for other ranks. A unit that is gathered here already may be in use: it is not released."""
        was_released = unit.weights.state is WeightsState.RELEASED
        unit.weights.gather_for_others()
        if was_released and unit not in keep and not self._demand.is_to_come(unit):
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
        numbers = sorted({number for number in self._comm.read(shared).flatten().tolist() if number != _NOTHING})
        for number in numbers:
            unit = self._units[number]
            self._recorded.append(unit)
            with self._comm.announced():
                if number == mine:
                    unit.weights.gather()
                else:
                    if unit.weights.state is WeightsState.RELEASED:
                        self._early.add(unit)
                    self._take_part(unit)
        self._demand.advance()
        return bool(numbers)

    def _record(self, unit: Unit, recomputes: bool) -> None:
        """Record what this rank needs in the first pass, and the modules that a checkpoint recomputes together."""
        if unit in self._early or unit.weights.state is WeightsState.RELEASED:
            self._needed.append(unit.name)
            self._early.discard(unit)
        self._recomputed = [*self._recomputed, unit] if recomputes else []
        for other in self._recomputed:
            if _path(other) != _path(unit):
                self._together.add(_common(_path(other), _path(unit)))

    def _merged(self) -> list[Unit]:
        """What the ranks needed in this pass, in one order in which each of them finds its own."""
        mine = self._needed, self._together
        with self._comm.announced():  # all ranks have just found that none needs a gather
            everyone = self._comm.share_object(mine, f"what the {self._name} gathered", "gather")
        together = set().union(*(recomputed for _, recomputed in everyone))
        if self._is_backward:
            self._units = _backwards(self._units, together)
        numbers = {unit.name: number for number, unit in enumerate(self._units)}
        return [self._units[n] for n in merged([numbers[name] for name in needed] for needed, _ in everyone)]

    def _with_siblings(self, recorded: list[Unit]) -> list[Unit]:
        """`recorded`, and next to them the units in members of their containers that no rank entered.

        The units of such a member have their turns in forward order in a backward too: a rank may recompute it, and
        otherwise keeps the first ones until it needs them.
        """
        agreed = list(recorded)
        missing = [unit for unit in self._units if unit not in recorded]
        for (container, member), group in groupby(missing, lambda unit: self._member(unit, recorded)):
            members = sorted(group, key=lambda unit: unit.number)
            family = [turn for turn, other in enumerate(agreed) if member and _lies_in(other, container)]
            first = self._units.index(members[0])
            before = [turn for turn in family if self._units.index(agreed[turn]) < first]
            if family:
                turn = before[-1] + 1 if before else family[0]
                agreed[turn:turn] = members
        return agreed

    def _member(self, unit: Unit, recorded: list[Unit]) -> tuple[str, str]:
        """The innermost list or dictionary of modules that was entered, but not in the member that this unit lies in,
        and that member, by path; empty if there is no such container."""
        member = _path(unit)
        while member:
            container = member.rpartition(".")[0]
            is_entered = any(_lies_in(other, member) for other in recorded)
            is_known = any(_lies_in(other, container) for other in recorded)
            if container in self._containers and is_known and not is_entered:
                return container, member
            member = container
        return "", ""


def _path(unit: Unit) -> str:
    """The path of a unit's first module."""
    runs = unit.spec.runs
    return runs[0][0] if runs and runs[0] else ""


def _common(one: str, other: str) -> str:
    """The path of the innermost module around two others."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    return ".".join(name for name, _ in pairs)


def _backwards(units: Sequence[Unit], together: Collection[str], around: str = "") -> list[Unit]:
    """The order in which a backward comes to units: the last modules first, but those `together`, which lie in modules
    that are recomputed as a whole, in the order of a forward."""
    depth = len(around.split(".")) if around else 0
    if len({_path(unit) for unit in units}) == 1:
        return list(units)
    groups = [list(group) for _, group in groupby(units, lambda unit: _path(unit).split(".")[depth:][:1])]
    arranged = [_backwards(group, together, ".".join(_path(group[0]).split(".")[: depth + 1])) for group in groups]
    return list(chain.from_iterable(arranged if around in together else arranged[::-1]))


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

    def begin(self, name: str, demand: Demand = UNKNOWN) -> None:
        """A pass begins."""
        self._current = self._orders.get(name) if not self.all_locked else None
        if self._current is not None:
            self._current.begin(self._kept, demand)
        self._kept = set()

    def gather(self, unit: Unit, ahead: Sequence[Unit], recomputes: bool = False) -> None:
        """Start to gather a unit that is about to be used, and those `ahead` of it."""
        if self._current is not None:
            self._current.gather(unit, ahead, recomputes)
            return
        unit.weights.gather()
        for other in ahead:
            other.weights.gather()

    def passes(self, unit: Unit) -> bool:
        """Whether the gather of a unit that this rank does not enter is over."""
        return self._current is None or self._current.passes(unit)

    def finish(self, keep: Collection[Unit] = ()) -> None:
        """The pass ends; the units to `keep` stay gathered."""
        if self._current is not None and self._current.finish(keep):
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

    def gather(self, unit: Unit, ahead: Sequence[Unit] = (), recomputes: bool = False) -> None:
        """Gather a unit's weights; the gathers of those `ahead` are issued before it waits."""
        self.gather_orders.gather(unit, ahead, recomputes)
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
