"""The order in which a forward enters the units: what is prefetched, what stays gathered, and what is reduced first.

One rank follows its own forwards. Several ranks may enter different units: they exchange their recorded orders every
hundredth backward, and keep one merged order. The order of the gathers is agreed on separately (see `gathers`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from shardwise.config.sections import Runtime
from shardwise.unit import Unit

_AGREE_EVERY = 100
"""Backwards that reduce, between two exchanges of the recorded orders."""


@dataclass(frozen=True)
class Prefetch:
    """Limits on gathers ahead of use: the number of units, their bytes, and their bytes with the unit in use."""

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


def merged(sequences: Iterable[Sequence[int]]) -> list[int]:
    """One sequence in which each of them is contained as far as their orders agree. Smaller items come first where they
    leave that open. Neighbours that two of them swap are there once, in one order.

    >>> merged([[0, 2, 3], [0, 1, 3, 4]])
    [0, 1, 2, 3, 4]
    """
    whole: list[int] = []
    left = [deque(sequence) for sequence in dict.fromkeys(map(tuple, sequences)) if sequence]
    while left:
        heads = Counter(sequence[0] for sequence in left)
        holders = Counter(item for sequence in left for item in set(sequence))
        free = [item for item in heads if holders[item] == heads[item]]  # in no sequence behind another item
        item = min(free or heads)
        whole.append(item)
        for sequence in left:
            if item in islice(sequence, 2):
                sequence.remove(item)
        left = [sequence for sequence in left if sequence]
    return whole


class UnitOrder:
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
        """Before reductions: in every hundredth call, merge the orders that ranks recorded into one. A collective."""
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
        self.last = seen[-1] if seen else None
        self.forward = list(seen)
        for before, unit in zip([None, *self._all], self._all, strict=False):
            if unit not in seen:  # other data may enter it, next to its neighbour
                self.forward.insert(self.forward.index(before) + 1 if before is not None else 0, unit)
        self.backward = self.forward[::-1]
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
